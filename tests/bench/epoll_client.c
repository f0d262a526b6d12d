/* The yardstick: the least that a client can do. N streams in a closed loop over keep-alive connections, one epoll set,
 * recvmsg with SO_TIMESTAMPNS, and only the search for event ends. What other clients cost is told as a ratio to this one.
 *
 * Log file, little endian: 8 u64 (magic, version, requests, 0 …), then per request 6 u64 (serial given by the server in
 * its first token, sent_ns, tokens, coalesced, done_ns, 0), kernel_ns[tokens], user_ns[tokens], on CLOCK_MONOTONIC.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <netinet/tcp.h>
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

#define MAGIC 0x31544e454c434c56ULL /* "VLCLENT1" */

struct request {
    uint64_t serial, sent_ns, tokens, coalesced, done_ns, spare;
    uint64_t *kernel, *user;
};

struct stream {
    int fd;
    bool active, newline; /* the last byte so far was \n: an event may end on the next */
    uint64_t events;
    char head[128]; /* the text of the first token is read from the bytes after the role event */
    size_t head_len;
    struct request *now;
};

static struct request **done;
static size_t done_len, done_cap;
static uint64_t max_tokens = 250;

static void die(const char *what) {
    perror(what);
    exit(1);
}

static uint64_t ns_of(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void send_request(struct stream *s, const char *text, size_t len) {
    struct request *r = calloc(1, sizeof *r);
    if (!r || !(r->kernel = malloc(16 * max_tokens))) die("epoll_client: out of memory");
    r->user = r->kernel + max_tokens;
    r->serial = UINT64_MAX;
    s->now = r;
    s->active = true;
    s->events = 0;
    s->newline = false;
    s->head_len = 0;
    r->sent_ns = ns_of(CLOCK_MONOTONIC);
    for (size_t at = 0; at < len;) {
        ssize_t n = send(s->fd, text + at, len - at, MSG_NOSIGNAL);
        if (n < 0) die("epoll_client: send");
        at += (size_t)n;
    }
}

static void end_request(struct stream *s, uint64_t now) {
    if (done_len == done_cap && !(done = realloc(done, sizeof *done * (done_cap = done_cap ? 2 * done_cap : 4096)))) die("memory");
    s->now->done_ns = now;
    done[done_len++] = s->now;
    s->active = false;
}

/* Counts the event ends in one read; the tokens are events 1 … max_tokens (0 is the role). */
static void parse(struct stream *s, const char *p, size_t n, uint64_t kernel, uint64_t user) {
    struct request *r = s->now;
    const char *end = p + n;
    uint64_t first = r->tokens;
    if (s->events <= 1 && r->serial == UINT64_MAX) { /* join with the truth by the first token's text */
        const char *text = memmem(p, n, "\" r", 3);
        if (text && text + 11 <= end) r->serial = strtoull(text + 3, NULL, 10);
    }
    if (s->newline && n && *p == '\n') s->events++, s->newline = false;
    while ((p = memmem(p, (size_t)(end - p), "\n\n", 2))) {
        p += 2;
        if (s->events >= 1 && s->events <= max_tokens) {
            r->kernel[r->tokens] = kernel;
            r->user[r->tokens++] = user;
        }
        s->events++;
    }
    s->newline = end[-1] == '\n' && !(n > 1 && end[-2] == '\n');
    if (r->tokens > first + 1) r->coalesced += r->tokens - first - 1;
}

static bool serve(struct stream *s, int64_t unix_minus_mono) {
    char buf[65536], control[64];
    struct iovec iov = {buf, sizeof buf};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t n = recvmsg(s->fd, &m, MSG_DONTWAIT);
    uint64_t user = ns_of(CLOCK_MONOTONIC), kernel = user;
    if (n == 0) {
        fprintf(stderr, "epoll_client: the server closed a connection\n");
        exit(1);
    }
    if (n < 0) {
        if (errno == EAGAIN || errno == EINTR) return false;
        die("epoll_client: recvmsg");
    }
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_TIMESTAMPNS) {
            struct timespec t;
            memcpy(&t, CMSG_DATA(c), sizeof t);
            kernel = (uint64_t)((int64_t)t.tv_sec * 1000000000 + t.tv_nsec - unix_minus_mono);
        }
    if (!s->active) return false;
    parse(s, buf, (size_t)n, kernel, user);
    if (n >= 5 && !memcmp(buf + n - 5, "0\r\n\r\n", 5)) {
        end_request(s, user);
        return true;
    }
    return false;
}

static void write_log(const char *path) {
    FILE *f = fopen(path, "wb");
    if (!f) die(path);
    uint64_t head[8] = {MAGIC, 1, done_len};
    fwrite(head, sizeof head, 1, f);
    for (size_t i = 0; i < done_len; i++) {
        fwrite(done[i], 6 * sizeof(uint64_t), 1, f);
        fwrite(done[i]->kernel, 8, done[i]->tokens, f);
        fwrite(done[i]->user, 8, done[i]->tokens, f);
    }
    if (fclose(f)) die(path);
}

static int open_stream(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to)) die("epoll_client: connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &one, sizeof one)) die("SO_TIMESTAMPNS");
    return fd;
}

int main(int argc, char **argv) {
    static const struct option flags[] = {{"port", 1, 0, 'p'}, {"streams", 1, 0, 'n'}, {"seconds", 1, 0, 's'}, {"tokens", 1, 0, 't'},
                                          {"ramp-ms", 1, 0, 'r'}, {"prompt-bytes", 1, 0, 'b'}, {"log", 1, 0, 'l'}, {0}};
    int port = 0, n = 100, at;
    double seconds = 10;
    uint64_t ramp_ns = 1000000000, prompt = 512;
    const char *log_path = NULL;
    for (int f; (f = getopt_long(argc, argv, "", flags, &at)) != -1;) {
        if (f == '?') return 2;
        if (f == 'p') port = atoi(optarg);
        if (f == 'n') n = atoi(optarg);
        if (f == 's') seconds = atof(optarg);
        if (f == 't') max_tokens = strtoull(optarg, NULL, 10);
        if (f == 'r') ramp_ns = strtoull(optarg, NULL, 10) * 1000000u;
        if (f == 'b') prompt = strtoull(optarg, NULL, 10);
        if (f == 'l') log_path = optarg;
    }
    if (n < 1 || !max_tokens) {
        fprintf(stderr, "epoll_client: --streams and --tokens must be at least 1\n");
        return 2;
    }
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    prctl(PR_SET_TIMERSLACK, 1);
    char *text = malloc(prompt + 1024), *body = malloc(prompt + 512);
    if (!text || !body) die("memory");
    size_t b = (size_t)sprintf(body, "{\"model\":\"bench\",\"messages\":[{\"role\":\"user\",\"content\":\"");
    memset(body + b, 'a', prompt);
    b += prompt;
    b += (size_t)sprintf(body + b, "\"}],\"max_tokens\":%" PRIu64 ",\"stream\":true,\"stream_options\":{\"include_usage\":true,\"continuous_usage_stats\":true}}", max_tokens);
    size_t len = (size_t)sprintf(text, "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n", b);
    memcpy(text + len, body, b);
    len += b;

    int ep = epoll_create1(EPOLL_CLOEXEC), running = 0, started = 0;
    struct stream *streams = calloc((size_t)n, sizeof *streams);
    if (!streams) die("memory");
    for (int i = 0; i < n; i++) {
        streams[i].fd = open_stream(port);
        struct epoll_event ev = {.events = EPOLLIN, .data.ptr = &streams[i]};
        if (epoll_ctl(ep, EPOLL_CTL_ADD, streams[i].fd, &ev)) die("epoll_ctl");
    }
    uint64_t t0 = ns_of(CLOCK_MONOTONIC), stop = t0 + (uint64_t)(seconds * 1e9);
    struct epoll_event events[512];
    while (started < n || running) {
        uint64_t now = ns_of(CLOCK_MONOTONIC), due = t0 + ramp_ns * (uint64_t)started / (uint64_t)n;
        while (started < n && due <= now) {
            send_request(&streams[started++], text, len);
            running++;
            due = t0 + ramp_ns * (uint64_t)started / (uint64_t)n;
        }
        uint64_t wait = started < n && due > now ? due - now : 0;
        struct timespec timeout = {(time_t)(wait / 1000000000u), (long)(wait % 1000000000u)};
        int k = epoll_pwait2(ep, events, 512, started < n ? &timeout : NULL, NULL);
        if (k < 0 && errno != EINTR) die("epoll_pwait2");
        int64_t unix_minus_mono = (int64_t)(ns_of(CLOCK_REALTIME) - ns_of(CLOCK_MONOTONIC));
        for (int i = 0; i < k; i++)
            if (serve(events[i].data.ptr, unix_minus_mono)) {
                if (ns_of(CLOCK_MONOTONIC) < stop) send_request(events[i].data.ptr, text, len);
                else running--;
            }
    }
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    uint64_t tokens = 0;
    for (size_t i = 0; i < done_len; i++) tokens += done[i]->tokens;
    double cpu = (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + 1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
    printf("{\"requests\":%zu,\"tokens\":%" PRIu64 ",\"cpu_s\":%.3f,\"cpu_us_per_token\":%.2f}\n", done_len, tokens, cpu, tokens ? cpu * 1e6 / (double)tokens : 0);
    if (log_path) write_log(log_path);
    return 0;
}
