/* A server with vLLM's wire format that sends tokens on a schedule and logs when it really did.
 *
 * One thread: epoll_pwait2 with nanosecond timeouts and a heap of deadlines, never a busy loop. Each event is one HTTP
 * chunk and one send(). CLOCK_MONOTONIC is read right before and right after each send that carries tokens; the log stays
 * in memory and is written at GET /dump and at SIGTERM, so that logging costs the schedule nothing.
 *
 * The first token's text is " r<serial>": a client that reports no request id can still be joined by the text it received.
 *
 * Log file, little endian: a header of 8 u64 (magic, version, requests, unix_minus_mono_ns at start, the same at the dump,
 * dump time, 0, 0), then per request 10 u64 (serial, read_ns, headers_ns, first_deadline_ns, gap_ns, tokens planned,
 * tokens per write, writes done, state, id length), the id padded to 8 bytes, before_ns[writes], after_ns[writes].
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAGIC 0x3148545552544c56ULL /* "VLTRUTH1" */
#define MAX_HEADER (64u << 10)
#define MAX_BODY (64u << 20)
#define MAX_ID 128
#define SENDS_PER_ROUND 64 /* then the sockets are looked at again */
#define HIST_SUB 128       /* buckets per octave: relative error below 1 % */
#define HIST_SIZE (HIST_SUB * 40)

enum mode { PHASES, TICK };
enum state { RUNNING = 0, FINISHED = 1, ABORTED = 2 };

struct schedule {
    uint64_t tokens, gap_ns, ttft_ns, per_write, event_bytes;
    enum mode mode;
};

struct entry { /* one request in the log */
    uint64_t serial, read_ns, headers_ns, first_ns, gap_ns, tokens, per_write, writes;
    enum state state;
    uint64_t *before, *after;
    char id[MAX_ID + 1];
};

struct conn {
    int fd;
    char *in;
    size_t in_len, in_cap;
    bool streaming, streamed, usage_at_end, usage_always, close_after, blocked, continued;
    struct schedule plan;
    struct entry *entry;
    uint64_t tokens_sent, prompt_tokens, deadline_ns;
    int heap_at; /* -1: not in the heap */
    char prefix[MAX_ID + 256];
    size_t prefix_len;
    char *pending;
    size_t pending_len, pending_at, pending_cap;
    struct conn *next_dead;
};

static struct schedule defaults = {250, 20000000, 50000000, 1, 0, PHASES};
static const char *log_path, *model = "bench";
static struct conn **heap;
static int heap_len, heap_cap, epfd, active, connections;
static struct conn *dead; /* freed after the batch of events that may still name them */
static struct entry **entries;
static size_t entries_len, entries_cap;
static uint64_t hist[HIST_SIZE], hist_n, late_max, tokens_total, blocked_total, serial;
static int64_t clock_offset_start;
static volatile sig_atomic_t stopping;
static char *out;
static size_t out_cap;
static long long created;

static void die(const char *what) {
    perror(what);
    exit(1);
}

static void *grow(void *p, size_t size) {
    p = realloc(p, size);
    if (!p) die("truth_server: out of memory");
    return p;
}

static inline uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int64_t unix_minus_mono(void) {
    struct timespec a, b;
    clock_gettime(CLOCK_REALTIME, &a);
    uint64_t m = now_ns();
    clock_gettime(CLOCK_REALTIME, &b);
    int64_t x = a.tv_sec * 1000000000LL + a.tv_nsec, y = b.tv_sec * 1000000000LL + b.tv_nsec;
    return x + (y - x) / 2 - (int64_t)m;
}

/* ---- lateness ---- */

static int bucket(uint64_t v) {
    if (v < HIST_SUB) return (int)v;
    int shift = 63 - __builtin_clzll(v) - 7;
    int i = HIST_SUB * (shift + 1) + (int)((v >> shift) - HIST_SUB);
    return i < HIST_SIZE ? i : HIST_SIZE - 1;
}

static uint64_t bucket_top(int i) {
    if (i < HIST_SUB) return (uint64_t)i;
    int shift = i / HIST_SUB - 1;
    return ((uint64_t)(i % HIST_SUB + HIST_SUB + 1) << shift) - 1;
}

static double quantile_us(double q) {
    uint64_t rank = (uint64_t)(q * (double)hist_n), seen = 0;
    for (int i = 0; i < HIST_SIZE; i++)
        if ((seen += hist[i]) > rank) return (double)bucket_top(i) / 1e3;
    return (double)late_max / 1e3;
}

static int stats_json(char *buf, size_t size) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    double cpu = (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + 1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
    return snprintf(buf, size,
                    "{\"active\":%d,\"connections\":%d,\"requests\":%zu,\"tokens\":%" PRIu64 ",\"writes\":%" PRIu64
                    ",\"blocked\":%" PRIu64 ",\"cpu_s\":%.3f,\"late_us\":{\"p50\":%.1f,\"p99\":%.1f,\"p99_9\":%.1f,\"max\":%.1f}}\n",
                    active, connections, entries_len, tokens_total, hist_n, blocked_total, cpu, quantile_us(.5),
                    quantile_us(.99), quantile_us(.999), (double)late_max / 1e3);
}

/* ---- the heap of deadlines ---- */

static inline void heap_put(int i, struct conn *c) {
    heap[i] = c;
    c->heap_at = i;
}

static void sift_up(int i) {
    struct conn *c = heap[i];
    while (i && heap[(i - 1) / 2]->deadline_ns > c->deadline_ns) {
        heap_put(i, heap[(i - 1) / 2]);
        i = (i - 1) / 2;
    }
    heap_put(i, c);
}

static void sift_down(int i) {
    struct conn *c = heap[i];
    for (int child; (child = 2 * i + 1) < heap_len; i = child) {
        if (child + 1 < heap_len && heap[child + 1]->deadline_ns < heap[child]->deadline_ns) child++;
        if (heap[child]->deadline_ns >= c->deadline_ns) break;
        heap_put(i, heap[child]);
    }
    heap_put(i, c);
}

static void heap_add(struct conn *c) {
    if (heap_len == heap_cap) heap = grow(heap, sizeof *heap * (size_t)(heap_cap = heap_cap ? 2 * heap_cap : 1024));
    heap_put(heap_len++, c);
    sift_up(heap_len - 1);
}

static void heap_remove(struct conn *c) {
    int i = c->heap_at;
    if (i < 0) return;
    c->heap_at = -1;
    struct conn *last = heap[--heap_len];
    if (last == c) return;
    heap_put(i, last);
    sift_up(i);
    sift_down(last->heap_at);
}

/* ---- connections ---- */

static void conn_close(struct conn *c) {
    if (c->fd < 0) return;
    heap_remove(c);
    if (c->streaming) {
        active--;
        c->entry->state = ABORTED;
        c->streaming = false;
    }
    close(c->fd);
    c->fd = -1;
    connections--;
    c->next_dead = dead;
    dead = c;
}

static void free_dead(void) {
    while (dead) {
        struct conn *c = dead;
        dead = c->next_dead;
        free(c->in);
        free(c->pending);
        free(c);
    }
}

/* True when every byte is with the kernel; what is not waits in `pending`. A dead peer closes the connection. */
static bool conn_send(struct conn *c, const char *data, size_t len) {
    size_t done = 0;
    if (c->fd < 0) return false;
    if (c->pending_at == c->pending_len) {
        while (done < len) {
            ssize_t n = send(c->fd, data + done, len - done, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (n > 0) {
                done += (size_t)n;
            } else if (errno == EAGAIN) {
                break;
            } else if (errno != EINTR) {
                conn_close(c);
                return false;
            }
        }
        if (done == len) return true;
        blocked_total++;
        c->pending_at = c->pending_len = 0;
    }
    if (c->pending_len + len - done > c->pending_cap) c->pending = grow(c->pending, c->pending_cap = c->pending_len + len - done);
    memcpy(c->pending + c->pending_len, data + done, len - done);
    c->pending_len += len - done;
    return false;
}

static void conn_answer(struct conn *c, int status, const char *reason, const char *type, const char *body, size_t len) {
    char head[256];
    int n = snprintf(head, sizeof head, "HTTP/1.1 %d %s\r\nserver: truth\r\ncontent-length: %zu\r\ncontent-type: %s\r\n\r\n",
                     status, reason, len, type);
    char *all = grow(NULL, (size_t)n + len);
    memcpy(all, head, (size_t)n);
    memcpy(all + n, body, len);
    conn_send(c, all, (size_t)n + len);
    free(all);
}

static void conn_json(struct conn *c, int status, const char *reason, const char *body) {
    conn_answer(c, status, reason, "application/json", body, strlen(body));
}

/* ---- events ---- */

static inline char *put(char *p, const char *s, size_t n) {
    memcpy(p, s, n);
    return p + n;
}
#define PUT(p, s) put(p, s, sizeof(s) - 1)

static char *put_number(char *p, uint64_t v) {
    char digits[20];
    int n = 0;
    do digits[n++] = (char)('0' + v % 10);
    while (v /= 10);
    while (n) *p++ = digits[--n];
    return p;
}

/* Frames [body, end) as one HTTP chunk; eight bytes before `body` are free. Returns where the chunk starts; `end` moves. */
static char *frame(char *body, char **end) {
    static const char hex[] = "0123456789abcdef";
    size_t len = (size_t)(*end - body);
    char *p = body - 2;
    p[0] = '\r', p[1] = '\n';
    do *--p = hex[len & 15];
    while (len >>= 4);
    *end = PUT(*end, "\r\n");
    return p;
}

static char *put_usage(struct conn *c, char *p, uint64_t completion, bool details) {
    p = PUT(p, ",\"usage\":{\"prompt_tokens\":");
    p = put_number(p, c->prompt_tokens);
    p = PUT(p, ",\"total_tokens\":");
    p = put_number(p, c->prompt_tokens + completion);
    p = PUT(p, ",\"completion_tokens\":");
    p = put_number(p, completion);
    return details ? PUT(p, ",\"completion_tokens_details\":null}") : PUT(p, "}");
}

static char *put_text(struct conn *c, char *p, uint64_t i) {
    char *start = p;
    if (i == 0) {
        p += sprintf(p, " r%08" PRIu64, c->entry->serial);
    } else {
        uint64_t word = (i * 2654435761u) % 1000;
        *p++ = ' ', *p++ = 'w';
        *p++ = (char)('0' + word / 100), *p++ = (char)('0' + word / 10 % 10), *p++ = (char)('0' + word % 10);
    }
    if (c->plan.event_bytes > (size_t)(p - start)) {
        size_t fill = c->plan.event_bytes - (size_t)(p - start);
        memset(p, 'x', fill);
        p += fill;
    }
    return p;
}

/* Token `i` as one framed chunk at `p` (moved to its start by the caller's copy); returns its end. */
static char *put_token(struct conn *c, char *at, uint64_t i) {
    char *body = at + 8, *p = put(body, c->prefix, c->prefix_len);
    p = PUT(p, "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"");
    p = put_text(c, p, i);
    p = PUT(p, "\"},\"logprobs\":null,\"finish_reason\":");
    p = i + 1 == c->plan.tokens ? PUT(p, "\"length\",\"stop_reason\":null,\"token_ids\":null}]") : PUT(p, "null,\"token_ids\":null}]");
    if (c->usage_always) p = put_usage(c, p, i + 1, true);
    p = PUT(p, "}\n\n");
    char *start = frame(body, &p);
    memmove(at, start, (size_t)(p - start));
    return at + (p - start);
}

static void send_role(struct conn *c) {
    char *body = out + 8, *p = put(body, c->prefix, c->prefix_len);
    p = PUT(p, "\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}]");
    if (c->usage_always) p = put_usage(c, p, 0, true);
    p = PUT(p, ",\"prompt_token_ids\":null,\"prompt_text\":null}\n\n");
    char *start = frame(body, &p);
    conn_send(c, start, (size_t)(p - start));
}

static void conn_read(struct conn *c);

static void finish(struct conn *c) {
    active--;
    c->streaming = false;
    c->entry->state = FINISHED;
    if (c->streamed) {
        if (c->usage_at_end) {
            char *body = out + 8, *p = put(body, c->prefix, c->prefix_len);
            p = PUT(p, "\"choices\":[]");
            p = put_usage(c, p, c->plan.tokens, false);
            p = PUT(p, ",\"system_fingerprint\":\"vllm-0.32.0-truth\"}\n\n");
            char *start = frame(body, &p);
            conn_send(c, start, (size_t)(p - start));
        }
        conn_send(c, "e\r\ndata: [DONE]\n\n\r\n", 19);
        conn_send(c, "0\r\n\r\n", 5);
    }
    if (c->close_after && c->pending_at == c->pending_len) conn_close(c);
    if (c->fd >= 0) conn_read(c);
}

static void send_json_completion(struct conn *c) {
    size_t cap = c->plan.tokens * (16 + c->plan.event_bytes) + 2048;
    char *body = grow(NULL, cap), *p = body;
    p += sprintf(p, "{\"id\":\"chatcmpl-%s\",\"object\":\"chat.completion\",\"created\":%lld,\"model\":\"%s\",\"choices\":[{\"index\":0,"
                    "\"message\":{\"role\":\"assistant\",\"content\":\"", c->entry->id, created, model);
    for (uint64_t i = 0; i < c->plan.tokens; i++) p = put_text(c, p, i);
    p = PUT(p, "\"},\"logprobs\":null,\"finish_reason\":\"length\"}]");
    p = put_usage(c, p, c->plan.tokens, false);
    *p++ = '}';
    conn_answer(c, 200, "OK", "application/json", body, (size_t)(p - body));
    free(body);
}

static void schedule_next(struct conn *c) {
    struct entry *e = c->entry;
    if (c->tokens_sent >= c->plan.tokens) {
        heap_remove(c);
        finish(c);
        return;
    }
    c->deadline_ns = e->first_ns + c->tokens_sent * e->gap_ns;
    if (c->heap_at < 0) heap_add(c);
    else sift_down(c->heap_at);
}

/* One write that is due: the next tokens of a stream. */
static void send_due(struct conn *c) {
    struct entry *e = c->entry;
    uint64_t k = c->plan.per_write, left = c->plan.tokens - c->tokens_sent;
    if (k > left) k = left;
    if (!c->streamed) k = left;
    else if (c->tokens_sent == 0) send_role(c);
    if (c->fd < 0) return;
    char *p = out;
    if (c->streamed)
        for (uint64_t i = 0; i < k; i++) p = put_token(c, p, c->tokens_sent + i);
    uint64_t before = now_ns();
    if (c->streamed) conn_send(c, out, (size_t)(p - out));
    else send_json_completion(c);
    uint64_t after = now_ns();
    if (c->fd < 0) return;
    uint64_t late = before > c->deadline_ns ? before - c->deadline_ns : 0;
    hist[bucket(late)]++, hist_n++;
    if (late > late_max) late_max = late;
    e->before[e->writes] = before;
    e->after[e->writes++] = after;
    tokens_total += k;
    c->tokens_sent += k;
    if (c->pending_at < c->pending_len) { /* the peer does not read: go on when it does */
        c->blocked = true;
        heap_remove(c);
        return;
    }
    schedule_next(c);
}

static void conn_writable(struct conn *c) {
    while (c->pending_at < c->pending_len) {
        ssize_t n = send(c->fd, c->pending + c->pending_at, c->pending_len - c->pending_at, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) {
            c->pending_at += (size_t)n;
        } else if (errno == EAGAIN) {
            return;
        } else if (errno != EINTR) {
            conn_close(c);
            return;
        }
    }
    if (c->blocked) {
        c->blocked = false;
        c->entry->after[c->entry->writes - 1] = now_ns();
        schedule_next(c);
    } else if (c->close_after && !c->streaming) {
        conn_close(c);
    }
}

/* ---- requests ---- */

struct asked {
    bool stream, include_usage, continuous_usage;
    uint64_t max_tokens;
};

static bool key_is(const char *s, size_t n, const char *key) { return n == strlen(key) && !memcmp(s, key, n); }

/* The few fields that matter, at the top level and in stream_options, in one pass over the body. */
static struct asked read_body(const char *p, const char *end) {
    struct asked a = {0};
    int depth = 0;
    bool in_options = false;
    while (p < end) {
        char ch = *p++;
        if (ch == '{' || ch == '[') depth++;
        else if (ch == '}' || ch == ']') in_options = --depth > 1 && in_options;
        if (ch != '"') continue;
        const char *s = p, *q = p;
        for (;;) { /* to the closing quote, over escaped ones */
            q = memchr(q, '"', (size_t)(end - q));
            if (!q) return a;
            size_t slashes = 0;
            while (q - 1 - slashes >= s && *(q - 1 - slashes) == '\\') slashes++;
            if (slashes % 2 == 0) break;
            q++;
        }
        size_t n = (size_t)(q - s);
        p = q + 1;
        if (depth != 1 && !(depth == 2 && in_options)) continue;
        while (p < end && isspace((unsigned char)*p)) p++;
        if (p == end || *p != ':') continue;
        do p++;
        while (p < end && isspace((unsigned char)*p));
        if (p == end) break;
        if (depth == 1 && key_is(s, n, "stream")) a.stream = *p == 't';
        else if (depth == 1 && (key_is(s, n, "max_tokens") || key_is(s, n, "max_completion_tokens"))) {
            uint64_t v = 0;
            for (const char *d = p; d < end && isdigit((unsigned char)*d); d++) v = v * 10 + (uint64_t)(*d - '0');
            if (v) a.max_tokens = v;
        } else if (depth == 1 && key_is(s, n, "stream_options")) in_options = *p == '{';
        else if (depth == 2 && key_is(s, n, "include_usage")) a.include_usage = *p == 't';
        else if (depth == 2 && key_is(s, n, "continuous_usage_stats")) a.continuous_usage = *p == 't';
    }
    return a;
}

/* The value of header `name` among [head, end), or NULL. */
static const char *header(const char *head, const char *end, const char *name, size_t *len) {
    size_t n = strlen(name);
    for (const char *line = head; line < end;) {
        const char *eol = memchr(line, '\n', (size_t)(end - line));
        if (!eol) eol = end;
        if ((size_t)(eol - line) > n && line[n] == ':' && !strncasecmp(line, name, n)) {
            const char *v = line + n + 1, *stop = eol;
            while (v < stop && (*v == ' ' || *v == '\t')) v++;
            while (stop > v && isspace((unsigned char)stop[-1])) stop--;
            *len = (size_t)(stop - v);
            return v;
        }
        line = eol + 1;
    }
    return NULL;
}

static void header_number(const char *head, const char *end, const char *name, uint64_t scale, uint64_t *value) {
    size_t n;
    const char *v = header(head, end, name, &n);
    if (v && n && isdigit((unsigned char)*v)) *value = strtoull(v, NULL, 10) * scale;
}

static struct entry *new_entry(const char *head, const char *end) {
    struct entry *e = calloc(1, sizeof *e);
    if (!e) die("truth_server: out of memory");
    e->serial = serial++;
    size_t n;
    const char *id = header(head, end, "x-request-id", &n);
    if (id && n) {
        if (n > MAX_ID) n = MAX_ID;
        for (size_t i = 0; i < n; i++) e->id[i] = isgraph((unsigned char)id[i]) && id[i] != '"' && id[i] != '\\' ? id[i] : '_';
    } else {
        snprintf(e->id, sizeof e->id, "truth%08" PRIu64, e->serial);
    }
    if (entries_len == entries_cap) entries = grow(entries, sizeof *entries * (entries_cap = entries_cap ? 2 * entries_cap : 4096));
    return entries[entries_len++] = e;
}

static void begin(struct conn *c, const char *head, const char *head_end, const char *body, const char *end) {
    struct schedule s = defaults;
    struct asked a = read_body(body, end);
    if (a.max_tokens) s.tokens = a.max_tokens;
    header_number(head, head_end, "x-truth-tokens", 1, &s.tokens);
    header_number(head, head_end, "x-truth-gap-us", 1000, &s.gap_ns);
    header_number(head, head_end, "x-truth-ttft-us", 1000, &s.ttft_ns);
    header_number(head, head_end, "x-truth-events-per-write", 1, &s.per_write);
    header_number(head, head_end, "x-truth-event-bytes", 1, &s.event_bytes);
    size_t n;
    const char *m = header(head, head_end, "x-truth-mode", &n);
    if (m) s.mode = n == 4 && !strncasecmp(m, "tick", 4) ? TICK : PHASES;
    if (!s.tokens) s.tokens = 1;
    if (!s.per_write) s.per_write = 1;
    if (s.tokens > 10000000 || s.per_write > 4096 || s.event_bytes > 8u << 20) {
        conn_json(c, 400, "Bad Request", "{\"error\":{\"message\":\"schedule out of range\",\"type\":\"BadRequestError\",\"param\":null,\"code\":400}}");
        return;
    }
    struct entry *e = c->entry = new_entry(head, head_end);
    uint64_t writes = (s.tokens + s.per_write - 1) / s.per_write;
    e->before = grow(NULL, writes * sizeof *e->before);
    e->after = grow(NULL, writes * sizeof *e->after);
    size_t need = s.per_write * (s.event_bytes + 1024) + 4096;
    if (need > out_cap) out = grow(out, out_cap = need);
    c->plan = s;
    c->streamed = a.stream;
    c->usage_at_end = a.include_usage;
    c->usage_always = a.include_usage && a.continuous_usage;
    c->tokens_sent = 0;
    c->prompt_tokens = 1 + (uint64_t)(end - body) / 4;
    c->prefix_len = (size_t)snprintf(c->prefix, sizeof c->prefix,
        "data: {\"id\":\"chatcmpl-%s\",\"object\":\"chat.completion.chunk\",\"created\":%lld,\"model\":\"%s\",", e->id, created, model);
    c->streaming = true;
    active++;
    e->tokens = s.tokens;
    e->per_write = s.per_write;
    e->gap_ns = s.gap_ns;
    e->read_ns = now_ns();
    e->first_ns = e->read_ns + s.ttft_ns + (a.stream ? 0 : (s.tokens - 1) * s.gap_ns);
    uint64_t tick = s.gap_ns * s.per_write;
    if (s.mode == TICK && tick) e->first_ns = (e->first_ns + tick - 1) / tick * tick;
    c->deadline_ns = e->first_ns;
    if (a.stream) {
        static const char head200[] = "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                                      "vary: Origin\r\ntransfer-encoding: chunked\r\n\r\n";
        e->headers_ns = now_ns();
        conn_send(c, head200, sizeof head200 - 1);
    }
    if (c->fd >= 0) heap_add(c);
}

static bool write_log(void);

static bool is_path(const char *line, size_t n, const char *method, const char *path) {
    size_t m = strlen(method), p = strlen(path);
    return n > m + p + 1 && !memcmp(line, method, m) && line[m] == ' ' && !memcmp(line + m + 1, path, p) &&
           (line[m + 1 + p] == ' ' || line[m + 1 + p] == '?');
}

static void route(struct conn *c, const char *head, const char *head_end, const char *body, const char *end) {
    size_t n = (size_t)(head_end - head);
    char text[1024];
    if (is_path(head, n, "POST", "/v1/chat/completions")) {
        begin(c, head, head_end, body, end);
    } else if (is_path(head, n, "GET", "/health")) {
        conn_answer(c, 200, "OK", "text/plain", "", 0);
    } else if (is_path(head, n, "GET", "/version")) {
        conn_json(c, 200, "OK", "{\"version\":\"0.32.0\"}");
    } else if (is_path(head, n, "GET", "/v1/models")) {
        snprintf(text, sizeof text, "{\"object\":\"list\",\"data\":[{\"id\":\"%s\",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"vllm\","
                 "\"root\":\"%s\",\"parent\":null,\"max_model_len\":10000000,\"permission\":[]}]}", model, created, model);
        conn_json(c, 200, "OK", text);
    } else if (is_path(head, n, "GET", "/stats")) {
        stats_json(text, sizeof text);
        conn_json(c, 200, "OK", text);
    } else if (is_path(head, n, "GET", "/dump")) {
        if (write_log()) conn_json(c, 200, "OK", "{\"written\":true}");
        else conn_json(c, 500, "Internal Server Error", "{\"written\":false}");
    } else {
        conn_json(c, 404, "Not Found", "{\"detail\":\"Not Found\"}");
    }
    size_t len;
    const char *v = header(head, head_end, "connection", &len);
    c->close_after = v && len == 5 && !strncasecmp(v, "close", 5);
    if (c->close_after && !c->streaming && c->pending_at == c->pending_len) conn_close(c);
}

static void refuse(struct conn *c, const char *status_line) {
    char text[256];
    int n = snprintf(text, sizeof text, "HTTP/1.1 %s\r\nconnection: close\r\ncontent-length: 0\r\n\r\n", status_line);
    conn_send(c, text, (size_t)n);
    conn_close(c);
}

/* Serves the requests that are whole in the buffer. Returns the bytes that the next one still needs, 0 if unknown. */
static size_t serve_buffered(struct conn *c) {
    while (c->fd >= 0 && !c->streaming && c->in_len) {
        char *blank = memmem(c->in, c->in_len < MAX_HEADER ? c->in_len : MAX_HEADER, "\r\n\r\n", 4);
        if (!blank) {
            if (c->in_len >= MAX_HEADER) refuse(c, "431 Request Header Fields Too Large");
            return 0;
        }
        const char *head = c->in, *head_end = blank + 2;
        size_t head_len = (size_t)(blank + 4 - c->in), len, body_len = 0;
        if (header(head, head_end, "transfer-encoding", &len)) {
            refuse(c, "411 Length Required");
            return 0;
        }
        uint64_t declared = 0;
        header_number(head, head_end, "content-length", 1, &declared);
        body_len = declared;
        if (body_len > MAX_BODY) {
            refuse(c, "413 Content Too Large");
            return 0;
        }
        if (c->in_len < head_len + body_len) {
            if (!c->continued && header(head, head_end, "expect", &len)) {
                conn_send(c, "HTTP/1.1 100 Continue\r\n\r\n", 25);
                c->continued = true;
            }
            return head_len + body_len - c->in_len;
        }
        c->continued = false;
        route(c, head, head_end, c->in + head_len, c->in + head_len + body_len);
        if (c->fd < 0) return 0;
        c->in_len -= head_len + body_len;
        memmove(c->in, c->in + head_len + body_len, c->in_len);
    }
    return 0;
}

static void conn_read(struct conn *c) {
    size_t want = serve_buffered(c);
    while (c->fd >= 0) {
        size_t room = want > 16384 ? want : 16384;
        if (c->in_cap - c->in_len < room) c->in = grow(c->in, c->in_cap = c->in_len + room);
        ssize_t n = recv(c->fd, c->in + c->in_len, c->in_cap - c->in_len, MSG_DONTWAIT);
        if (n > 0) {
            c->in_len += (size_t)n;
            if (c->streaming && c->in_len > MAX_HEADER) conn_close(c); /* pipelining without end */
            else want = serve_buffered(c);
        } else if (n == 0) {
            conn_close(c);
        } else if (errno == EAGAIN) {
            return;
        } else if (errno != EINTR) {
            conn_close(c);
        }
    }
}

static void accept_all(int listener) {
    int fd;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        int one = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct conn *c = calloc(1, sizeof *c);
        if (!c) die("truth_server: out of memory");
        c->fd = fd;
        c->heap_at = -1;
        connections++;
        struct epoll_event ev = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.ptr = c};
        if (epoll_ctl(epfd, EPOLL_CTL_ADD, fd, &ev)) die("epoll_ctl");
    }
    if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) die("accept4");
}

/* ---- the log ---- */

static bool write_log(void) {
    if (!log_path) return false;
    FILE *f = fopen(log_path, "wb");
    if (!f) return false;
    uint64_t head[8] = {MAGIC, 1, entries_len, (uint64_t)clock_offset_start, (uint64_t)unix_minus_mono(), now_ns(), 0, 0};
    fwrite(head, sizeof head, 1, f);
    for (size_t i = 0; i < entries_len; i++) {
        struct entry *e = entries[i];
        uint64_t id_len = strlen(e->id);
        uint64_t row[10] = {e->serial, e->read_ns, e->headers_ns, e->first_ns, e->gap_ns, e->tokens, e->per_write, e->writes, e->state, id_len};
        char id[MAX_ID + 8] = {0};
        memcpy(id, e->id, id_len);
        fwrite(row, sizeof row, 1, f);
        fwrite(id, (id_len + 7) / 8 * 8, 1, f);
        fwrite(e->before, sizeof *e->before, e->writes, f);
        fwrite(e->after, sizeof *e->after, e->writes, f);
    }
    bool bad = ferror(f);
    return !(fclose(f) || bad);
}

static void on_signal(int number) {
    (void)number;
    stopping = 1;
}

static int listen_on(const char *host, int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), one = 1;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    if (inet_pton(AF_INET, host, &at.sin_addr) != 1) die("--host is not an IPv4 address");
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (struct sockaddr *)&at, sizeof at) || listen(fd, 8192)) die("truth_server: bind");
    socklen_t n = sizeof at;
    getsockname(fd, (struct sockaddr *)&at, &n);
    printf("READY %d\n", ntohs(at.sin_port));
    fflush(stdout);
    return fd;
}

static void serve(int listener) {
    sigset_t open_mask;
    sigemptyset(&open_mask);
    struct epoll_event events[256];
    while (!stopping) {
        uint64_t now = now_ns();
        for (int sent = 0; heap_len && heap[0]->deadline_ns <= now && sent < SENDS_PER_ROUND; sent++) {
            send_due(heap[0]);
            now = now_ns();
        }
        struct timespec wait = {0, 0}, *timeout = NULL;
        if (heap_len) {
            uint64_t ns = heap[0]->deadline_ns > now ? heap[0]->deadline_ns - now : 0;
            wait.tv_sec = (time_t)(ns / 1000000000u), wait.tv_nsec = (long)(ns % 1000000000u);
            timeout = &wait;
        }
        int n = epoll_pwait2(epfd, events, 256, timeout, &open_mask);
        if (n < 0 && errno != EINTR) die("epoll_pwait2");
        for (int i = 0; i < n; i++) {
            struct conn *c = events[i].data.ptr;
            if (!c) {
                accept_all(listener);
                continue;
            }
            if (c->fd >= 0 && events[i].events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) conn_read(c);
            if (c->fd >= 0 && events[i].events & EPOLLOUT) conn_writable(c);
        }
        free_dead();
    }
}

static uint64_t number(const char *text, const char *flag) {
    char *end;
    errno = 0;
    uint64_t v = strtoull(text, &end, 10);
    if (errno || *end || end == text || *text == '-') {
        fprintf(stderr, "truth_server: --%s %s is not a whole number\n", flag, text);
        exit(2);
    }
    return v;
}

int main(int argc, char **argv) {
    static const struct option flags[] = {{"port", 1, 0, 'p'}, {"tokens", 1, 0, 'n'}, {"gap-us", 1, 0, 'g'}, {"ttft-us", 1, 0, 't'},
        {"mode", 1, 0, 'm'}, {"events-per-write", 1, 0, 'k'}, {"event-bytes", 1, 0, 'b'}, {"log", 1, 0, 'l'}, {"model", 1, 0, 'M'},
        {"host", 1, 0, 'h'}, {0}};
    int port = 0, at;
    const char *host = "127.0.0.1";
    for (int f; (f = getopt_long(argc, argv, "", flags, &at)) != -1;) {
        if (f == '?') return 2;
        if (f == 'p') port = (int)number(optarg, "port");
        if (f == 'n') defaults.tokens = number(optarg, "tokens");
        if (f == 'g') defaults.gap_ns = 1000 * number(optarg, "gap-us");
        if (f == 't') defaults.ttft_ns = 1000 * number(optarg, "ttft-us");
        if (f == 'k') defaults.per_write = number(optarg, "events-per-write");
        if (f == 'b') defaults.event_bytes = number(optarg, "event-bytes");
        if (f == 'l') log_path = optarg;
        if (f == 'M') model = optarg;
        if (f == 'h') host = optarg;
        if (f == 'm') {
            if (strcmp(optarg, "phases") && strcmp(optarg, "tick")) {
                fprintf(stderr, "truth_server: --mode %s is neither phases nor tick\n", optarg);
                return 2;
            }
            defaults.mode = strcmp(optarg, "tick") ? PHASES : TICK;
        }
    }
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    prctl(PR_SET_TIMERSLACK, 1);
    sigset_t blocked;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGTERM), sigaddset(&blocked, SIGINT);
    sigprocmask(SIG_BLOCK, &blocked, NULL); /* delivered only inside epoll_pwait2 */
    struct sigaction sa = {.sa_handler = on_signal};
    sigaction(SIGTERM, &sa, NULL), sigaction(SIGINT, &sa, NULL);
    created = time(NULL);
    clock_offset_start = unix_minus_mono();
    out = grow(NULL, out_cap = 1 << 20);
    epfd = epoll_create1(EPOLL_CLOEXEC);
    int listener = listen_on(host, port);
    struct epoll_event ev = {.events = EPOLLIN | EPOLLET, .data.ptr = NULL};
    if (epfd < 0 || epoll_ctl(epfd, EPOLL_CTL_ADD, listener, &ev)) die("epoll");
    serve(listener);
    char text[1024];
    stats_json(text, sizeof text);
    fputs(text, stdout);
    if (log_path && !write_log()) die(log_path);
    return 0;
}
