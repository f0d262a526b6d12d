"""Token counts: by the model's tokenizer where one is given, else a named estimate. Owns the library ``tokenizers``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vllm_locust.errors import WorkloadError
from vllm_locust.workload.byte_classes import ERROR_P90, estimate_tokens

_BATCH_TEXTS = 1024
_ESTIMATE_BYTES = 4 << 20
_MIN_WORDS = 64


class TokenCounter(Protocol):
    """Counts the tokens of texts, special tokens left out."""

    @property
    def text_method(self) -> str:
        """How texts from a data set are counted: ``tokenizer:<name>`` or ``estimate:<what>``."""
        ...

    @property
    def generated_method(self) -> str:
        """The same for text that is generated from ``words()``."""
        ...

    @property
    def identity(self) -> str:
        """Changes when the counts could change: part of a cache key."""
        ...

    @property
    def exact(self) -> bool: ...

    def count(self, texts: pa.LargeStringArray) -> npt.NDArray[np.int64]: ...

    def words(self) -> tuple[str, ...]:
        """Words of one token each, at the start of a text and after a space."""
        ...


@cache
def common_words() -> tuple[str, ...]:
    text = resources.files("vllm_locust.workload").joinpath("words.txt").read_text(encoding="utf-8")
    return tuple(word for line in text.splitlines() if not line.startswith("#") for word in line.split())


class EstimatedTokens:
    """No tokenizer: texts by byte classes, generated text by its words, each one token in the usual vocabularies."""

    text_method = f"estimate:byte_classes±{ERROR_P90:.0%}"
    generated_method = "estimate:common_words±1%"
    identity = "byte_classes 1"
    exact = False

    def count(self, texts: pa.LargeStringArray) -> npt.NDArray[np.int64]:
        _, offset_buffer, data_buffer = texts.buffers()
        if offset_buffer is None or data_buffer is None:
            return np.zeros(len(texts), np.int64)
        offsets = np.frombuffer(memoryview(offset_buffer), np.int64)[texts.offset : texts.offset + len(texts) + 1]
        data = np.frombuffer(memoryview(data_buffer), np.uint8)
        counts = np.zeros(len(texts), np.int64)
        start = 0
        while start < len(texts):
            # Slices of a few megabytes bound the memory of the temporaries.
            end = int(np.searchsorted(offsets, offsets[start] + _ESTIMATE_BYTES, side="right")) - 1
            end = min(max(end, start + 1), len(texts))
            counts[start:end] = estimate_tokens(data, offsets[start : end + 1])
            start = end
        return counts

    def words(self) -> tuple[str, ...]:
        return common_words()


class TokenizerTokens:
    """The model's own tokenizer, as loaded by the ``tokenizers`` library."""

    exact = True

    def __init__(self, tokenizer: Any, name: str, identity: str) -> None:
        self._tokenizer = tokenizer
        self.text_method = self.generated_method = f"tokenizer:{name}"
        self.identity = identity
        self._name = name

    def count(self, texts: pa.LargeStringArray) -> npt.NDArray[np.int64]:
        counts = np.empty(len(texts), np.int64)
        for start in range(0, len(texts), _BATCH_TEXTS):
            batch = texts.slice(start, _BATCH_TEXTS).to_pylist()
            encodings = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            counts[start : start + len(batch)] = [len(encoding) for encoding in encodings]
        return counts

    def words(self) -> tuple[str, ...]:
        words = self._one_token(common_words())
        if len(words) < _MIN_WORDS:
            pieces = {self._tokenizer.decode([token]).strip() for token in self._tokenizer.get_vocab().values()}
            words = self._one_token(sorted(piece for piece in pieces if piece.isalpha()))
        if len(words) < _MIN_WORDS:
            raise WorkloadError(
                f"tokenizer {self._name}: only {len(words)} of its tokens are whole words, too few to generate "
                "text of an exact length; leave --tokenizer out to use the estimate, or use a data set"
            )
        return words[: 1 << 16]

    def _one_token(self, words: Sequence[str]) -> tuple[str, ...]:
        if not words:
            return ()
        alone = self.count(pa.array(words, pa.large_string()))
        spaced = self.count(pa.array([f" {word}" for word in words], pa.large_string()))
        return tuple(word for word, a, b in zip(words, alone, spaced, strict=True) if a == b == 1)


def answer_counter(tokenizer: str | None) -> Callable[[Sequence[str]], int] | None:
    """Counts the texts of one answer, for a server that does not; None without a tokenizer: an estimate is no count.

    May be called in a thread: the tokenizer works without the interpreter's lock.
    """
    if tokenizer is None:
        return None
    counter = token_counter(tokenizer)

    def count(texts: Sequence[str]) -> int:
        # A server may have sent half a surrogate pair, which is no text for any tokenizer.
        whole = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        return int(counter.count(pa.array(whole, pa.large_string())).sum())

    return count


def token_counter(tokenizer: str | None) -> TokenCounter:
    """The counter for ``--tokenizer``: a ``tokenizer.json``, a directory that holds one, or a name on the model hub."""
    if tokenizer is None:
        return EstimatedTokens()
    try:
        import tokenizers  # noqa: F401 - only whether it is there
    except ImportError:
        raise WorkloadError(
            f"--tokenizer {tokenizer}: the library is not installed; pip install 'vllm-locust[tokenizers]'"
        ) from None
    path = Path(tokenizer).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.is_file():
        return _from_file(path, tokenizer)
    if path.suffix == ".json" or path.is_absolute() or tokenizer.startswith("."):
        raise WorkloadError(f"--tokenizer {tokenizer}: there is no file {path}; give the path of a tokenizer.json")
    try:
        loaded = _hub_tokenizer(tokenizer)
    except Exception as error:  # noqa: BLE001 - the library raises a bare Exception for every failure of the hub
        raise WorkloadError(
            f"--tokenizer {tokenizer}: it is no file here and the model hub did not give it ({error}); "
            "give the path of the model's tokenizer.json"
        ) from None
    return TokenizerTokens(loaded, tokenizer, json.dumps(["hub", tokenizer]))


@lru_cache(maxsize=1)
def _hub_tokenizer(name: str) -> Any:
    from tokenizers import Tokenizer

    return _without_limits(Tokenizer.from_pretrained(name))


@lru_cache(maxsize=1)
def _file_tokenizer(path: Path, size: int, mtime_ns: int) -> Any:  # noqa: ARG001 - a file that changed is another one
    """Kept, since the workload and the worker both count by it, and a large one takes a second to load."""
    from tokenizers import Tokenizer

    return _without_limits(Tokenizer.from_file(str(path)))


def _from_file(path: Path, name: str) -> TokenizerTokens:
    stat = path.stat()
    try:
        loaded = _file_tokenizer(path.resolve(), stat.st_size, stat.st_mtime_ns)
    except Exception as error:  # noqa: BLE001 - the library raises a bare Exception for every malformed file
        raise WorkloadError(
            f"--tokenizer {name}: {path} is not a tokenizer.json ({error}); give the model's own"
        ) from None
    return TokenizerTokens(loaded, name, json.dumps([str(path.resolve()), stat.st_size, stat.st_mtime_ns]))


def _without_limits(tokenizer: Any) -> Any:
    """Files may ask for truncation or padding, and both would falsify the counts."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
