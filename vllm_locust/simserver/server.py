"""The routes, and what each completion request is made of."""

from __future__ import annotations

import asyncio
import hmac
import random
from collections.abc import Callable
from http import HTTPStatus

import orjson
from prometheus_client import CONTENT_TYPE_LATEST

from vllm_locust import clock
from vllm_locust.errors import UsageError
from vllm_locust.outcome import Outcome
from vllm_locust.simserver.answer_options import AnswerOptions
from vllm_locust.simserver.choice import Choice, ChoiceShape
from vllm_locust.simserver.completion import Api, ApiError, CompletionRequest, bad_request, parse_completion
from vllm_locust.simserver.deadline_timer import DeadlineTimer
from vllm_locust.simserver.engine import Engine, EngineRequest
from vllm_locust.simserver.events import Events
from vllm_locust.simserver.exchange import Exchange
from vllm_locust.simserver.faults import Fault, FaultPlan, parse_fault
from vllm_locust.simserver.http1 import Connection, End, HttpRequest, head
from vllm_locust.simserver.pacing import EnginePacer, FixedPacer, Pacer
from vllm_locust.simserver.response import JSON, Response, close_headers
from vllm_locust.simserver.server_metrics import NS_PER_S, REJECTION_REASONS, ServerMetrics
from vllm_locust.simserver.settings import Settings
from vllm_locust.simserver.tokens import Output, block_keys, generate, output_length, prompt_seed, token_id
from vllm_locust.simserver.truth import Truth, TruthLog

VERSION = "0.32.0"
COMPLETION_PATHS: dict[str, Api] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
_ID_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class SimServer:
    """One simulated vLLM. ``connection`` makes the protocol of a new connection."""

    def __init__(self, settings: Settings, loop: asyncio.AbstractEventLoop) -> None:
        self._settings = settings
        self._timer = DeadlineTimer(loop)
        self._created_unix_ns = clock.unix_ns()
        self.metrics = ServerMetrics(
            settings.model, self._created_unix_ns, lambda: self._pacer.gauges(), _cache_config(settings)
        )
        self._pacer = self._make_pacer()
        self._truth_log = TruthLog(settings.truth_log)
        self._fault_plan = FaultPlan(settings.faults, settings.seed)
        self._rejections = random.Random(settings.seed)
        self._fingerprint = f"vllm-{VERSION}-{(settings.seed * _ID_MULTIPLIER + 0x52B92EBB) & 0xFFFFFFFF:08x}"
        self._options = AnswerOptions(
            stream_interval=settings.stream_interval,
            sse_keep_alive_interval_s=settings.sse_keep_alive_interval_s,
            prompt_tokens_details=settings.enable_prompt_tokens_details,
            block_size=settings.engine.block_size,
            prefix_caching=settings.engine.enable_prefix_caching,
        )
        self._requests = 0
        self._in_flight = 0
        self._exchanges: set[Exchange] = set()
        self._connections: set[Connection] = set()
        self._routes: dict[str, tuple[str, Callable[[HttpRequest, Connection], None]]] = {
            "/v1/models": ("GET", self._models),
            "/health": ("GET", lambda http, connection: self._send(http, connection, HTTPStatus.OK, b"", None)),
            "/version": ("GET", lambda http, connection: self._json(http, connection, {"version": VERSION})),
            "/metrics": ("GET", self._metrics),
            "/reset_prefix_cache": ("POST", self._reset_prefix_cache),
            **dict.fromkeys(COMPLETION_PATHS, ("POST", self._complete)),
        }

    def connection(self) -> Connection:
        return Connection(self, self._connections)

    def handle(self, request: HttpRequest, connection: Connection) -> None:
        if request.path.startswith("/v1") and not self._authorized(request):
            self._unauthorized(request, connection)
            return
        route = self._routes.get(request.path)
        if route is None:
            self._json(request, connection, {"detail": "Not Found"}, HTTPStatus.NOT_FOUND)
        elif request.method != route[0]:
            body = orjson.dumps({"detail": "Method Not Allowed"})
            self._send(request, connection, HTTPStatus.METHOD_NOT_ALLOWED, body, JSON, allow=route[0])
        else:
            route[1](request, connection)

    async def shutdown(self, grace_s: float = 2.0) -> None:
        """Streams end with finish reason "abort"; then connections close, at the latest after ``grace_s``."""
        for exchange in list(self._exchanges):
            exchange.shutdown()
        deadline_ns = clock.monotonic_ns() + round(grace_s * NS_PER_S)
        while self._connections and clock.monotonic_ns() < deadline_ns:
            for connection in list(self._connections):
                connection.close_when_idle()
            await asyncio.sleep(0.005)
        for connection in list(self._connections):
            connection.abort()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self._timer.close()
        self._truth_log.close()

    # completions

    def _complete(self, http: HttpRequest, connection: Connection) -> None:
        settings = self._settings
        api = COMPLETION_PATHS[http.path]
        self._requests += 1
        truth = self._new_truth(http)
        try:
            fault = self._fault(http)
            completion = parse_completion(api, http.body, settings.model, settings.engine.max_model_len)
            if fault is not None and fault.name == "refuse_stream_options" and completion.stream_options:
                truth.fault, truth.fault_happened = str(fault), True
                raise bad_request("Unrecognized request argument supplied.", "stream_options")
        except ApiError as error:
            self._refuse(http, connection, error, truth)
            return
        exchange = self._exchange(http, connection, completion, fault, truth)
        self._exchanges.add(exchange)
        self._in_flight += completion.choices
        limit = settings.max_num_queued_reqs
        if fault is not None and fault.name == "status":
            exchange.refuse(_status_error(fault.integer("code")))
        elif fault is not None and fault.name == "html":
            exchange.send_page()
        elif limit is not None and self._in_flight > limit:
            self.metrics.rejected[REJECTION_REASONS[0]] += 1
            exchange.reject(in_stream=self._rejections.random() >= settings.reject_status_share)
        else:
            self.metrics.request_params_n.observe(completion.n)
            for choice in exchange.choices:
                self.metrics.request_params_max_tokens.observe(completion.max_tokens)
                self.metrics.request_max_num_generation_tokens.observe(choice.request.output_tokens)
            exchange.start()

    def _exchange(
        self,
        http: HttpRequest,
        connection: Connection,
        completion: CompletionRequest,
        fault: Fault | None,
        truth: Truth,
    ) -> Exchange:
        prefix = "chatcmpl" if completion.api == "chat" else "cmpl"
        response_id = f"{prefix}-{truth.request_id}"
        created = http.received_unix_ns // NS_PER_S
        truth.response_id = response_id
        truth.streamed = completion.stream
        truth.fault = None if fault is None else str(fault)
        truth.prompt_tokens = sum(len(prompt) for prompt in completion.prompts)
        choices = [
            self._choice(completion, index, fault, truth, http.received_mono_ns) for index in range(completion.choices)
        ]
        return Exchange(
            http=http,
            connection=connection,
            completion=completion,
            choices=choices,
            events=Events(completion.api, response_id, created, self._settings.model, self._fingerprint),
            options=self._options,
            pacer=self._pacer,
            timer=self._timer,
            fault=fault,
            truth=truth,
            on_end=self._ended,
        )

    def _choice(
        self, completion: CompletionRequest, index: int, fault: Fault | None, truth: Truth, received_mono_ns: int
    ) -> Choice:
        prompt = completion.prompts[index // completion.n]
        output = self._output(completion, prompt, index % completion.n)
        if fault is not None and fault.name == "short" and fault.integer("tokens") < len(output.texts):
            truth.fault_happened = True
            kept = fault.integer("tokens")
            output = Output(output.token_ids[:kept], output.texts[:kept], "stop")
        settings, length = self._settings, len(output.texts)
        chat = completion.api == "chat"
        reasoning = min(round(settings.reasoning_share * length), length - 1) if chat else 0
        cached = settings.engine.enable_prefix_caching and settings.first_token_ns is None
        name = f"{truth.request_id}-{index}"
        shape = ChoiceShape(
            api=completion.api,
            reasoning_field=settings.reasoning_field,
            reasoning_tokens=reasoning,
            tool_name=completion.tool_name,
            tool_call_id=f"chatcmpl-tool-{name}",
            top_logprobs=completion.top_logprobs,
            return_token_ids=completion.return_token_ids,
        )
        keys = block_keys(prompt, output, settings.engine.block_size) if cached else []
        return Choice(
            index=index,
            prompt=prompt,
            prompt_token_ids=[token_id(piece) for piece in prompt] if completion.return_token_ids else None,
            request=EngineRequest(name, len(prompt), length, keys),
            output=output,
            shape=shape,
            received_mono_ns=received_mono_ns,
            metrics=self.metrics,
        )

    def _output(self, completion: CompletionRequest, prompt: list[str], choice: int) -> Output:
        settings = self._settings
        seed = prompt_seed(settings.seed, prompt, choice)
        eos_mean = None if completion.ignore_eos else settings.eos_mean
        length, finish_reason = output_length(seed, completion.max_tokens, completion.min_tokens, eos_mean)
        return generate(seed, length, finish_reason, settings.empty_text_share)

    def _fault(self, http: HttpRequest) -> Fault | None:
        """The header decides, else the draw, which every request makes so that the sequence stays the same."""
        drawn = self._fault_plan.draw()
        asked = http.headers.get("x-sim-fault")
        if asked is None:
            return drawn
        try:
            return parse_fault(asked)
        except UsageError as error:
            raise bad_request(str(error), "X-Sim-Fault") from error

    def _new_truth(self, http: HttpRequest) -> Truth:
        generated = f"{(self._requests * _ID_MULTIPLIER + self._settings.seed) & _MASK:016x}"
        return Truth(
            request_id=http.headers.get("x-request-id", generated),
            response_id=None,
            path=http.path,
            received_unix_ns=http.received_unix_ns,
            received_mono_ns=http.received_mono_ns,
        )

    def _ended(self, exchange: Exchange) -> None:
        self._exchanges.discard(exchange)
        self._in_flight -= exchange.completion.choices
        self._truth_log.write(exchange.truth)

    # other answers

    def _refuse(self, http: HttpRequest, connection: Connection, error: ApiError, truth: Truth) -> None:
        response = Response(http, connection, truth)

        def end() -> None:
            response.settle()
            self._truth_log.write(truth)

        connection.on_complete = connection.on_lost = end
        response.send(error.status, error.body(), Outcome.HTTP_ERROR)

    def _authorized(self, http: HttpRequest) -> bool:
        key = self._settings.api_key
        given = http.headers.get("authorization", "")
        return key is None or hmac.compare_digest(given.encode(), f"Bearer {key}".encode())

    def _unauthorized(self, http: HttpRequest, connection: Connection) -> None:
        body = orjson.dumps({"error": "Unauthorized"})
        headers = [("content-length", str(len(body))), ("content-type", JSON), *close_headers(http)]
        if http.path in COMPLETION_PATHS:
            self._requests += 1
            truth = self._new_truth(http)
            truth.http_status, truth.outcome = int(HTTPStatus.UNAUTHORIZED), Outcome.HTTP_ERROR
            truth.ended_mono_ns = clock.monotonic_ns()
            self._truth_log.write(truth)
        connection.write(head(HTTPStatus.UNAUTHORIZED, headers) + body)
        connection.end(End.KEEP if http.keep_alive else End.CLOSE)

    def _models(self, http: HttpRequest, connection: Connection) -> None:
        settings, created = self._settings, self._created_unix_ns // NS_PER_S
        permission = {
            "id": "modelperm-88400131b2cb9191",
            "object": "model_permission",
            "created": created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        model = {
            "id": settings.model,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": settings.model,
            "parent": None,
            "max_model_len": settings.engine.max_model_len,
            "permission": [permission],
        }
        self._json(http, connection, {"object": "list", "data": [model]})

    def _metrics(self, http: HttpRequest, connection: Connection) -> None:
        self._send(http, connection, HTTPStatus.OK, self.metrics.exposition(), CONTENT_TYPE_LATEST)

    def _reset_prefix_cache(self, http: HttpRequest, connection: Connection) -> None:
        status = HTTPStatus.OK if self._pacer.reset_prefix_cache() else HTTPStatus.SERVICE_UNAVAILABLE
        self._send(http, connection, status, b"", None)

    def _json(
        self, http: HttpRequest, connection: Connection, value: object, status: HTTPStatus = HTTPStatus.OK
    ) -> None:
        self._send(http, connection, status, orjson.dumps(value), JSON)

    def _send(
        self,
        http: HttpRequest,
        connection: Connection,
        status: HTTPStatus,
        body: bytes,
        content_type: str | None,
        allow: str | None = None,
    ) -> None:
        headers = [] if allow is None else [("allow", allow)]
        headers.append(("content-length", str(len(body))))
        headers += [] if content_type is None else [("content-type", content_type)]
        headers += [("vary", "Origin"), *close_headers(http)]
        connection.write(head(status, headers) + (b"" if http.method == "HEAD" else body))
        connection.end(End.KEEP if http.keep_alive else End.CLOSE)

    def _make_pacer(self) -> Pacer:
        settings = self._settings
        if settings.first_token_ns is not None and settings.token_interval_ns is not None:
            return FixedPacer(self._timer, self.metrics, settings.first_token_ns, settings.token_interval_ns)
        return EnginePacer(Engine(settings.engine), self._timer, self.metrics, settings.frontend_ns)


def _status_error(code: int) -> ApiError:
    status = HTTPStatus(code)
    return ApiError(status, f"Scripted: {status.phrase}.", status.phrase.replace(" ", ""))


def _cache_config(settings: Settings) -> dict[str, str]:
    engine = settings.engine
    return {
        "block_size": str(engine.block_size),
        "num_gpu_blocks": str(engine.num_gpu_blocks),
        "enable_prefix_caching": str(engine.enable_prefix_caching),
        "kv_cache_size_tokens": str(engine.num_gpu_blocks * engine.block_size),
    }
