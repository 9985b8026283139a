//go:build ucx && cgo

#include "shim.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <ucp/api/ucp.h>
#include <ucs/debug/log_def.h>

enum { ASK, ANSWER }; // active messages

struct ask {
	uint64_t id, off, len;
};

struct answer {
	uint64_t id;
	int64_t status; // of UCX; the bytes follow if it is UCS_OK
};

struct get {
	struct get *next, **link; // of those of the peer that may be ended at once, or of free, or of over
	tu_worker *w;
	uint64_t id;  // what post gave, for the tu_over
	uint64_t key; // what the answer must have: the index in gets, and a number above it
	void *dst;
	size_t len;
	ucs_status_t status;
};

struct tu_worker {
	ucp_worker_h worker;
	int fd;
	const char *base; // what peers may read
	uint64_t size;
	ucp_address_t *address;
	struct message *sent;
	struct get *free, *over, gets[TU_GETS];
};

struct tu_peer {
	ucp_ep_h ep;
	ucs_status_t failed; // what has ended it, or UCS_OK
	struct get *asked;   // gets that UCX does not write yet
};

struct message {
	struct message *next, **link; // of those of the worker that UCX has
	tu_worker *w;
	ucp_ep_h ep;
	int cut;
	union {
		struct ask ask;
		struct answer answer;
	};
};

// Without memory the process ends, as it would in Go.
static void *need(size_t size)
{
	void *p = calloc(1, size);
	if (!p)
		abort();
	return p;
}

// UCX logs to stdout, which is not ours. What it says of an error is kept for
// tu_explain; the rest goes to stderr, if it was asked for.
static __thread char said[256];
static int verbose;

static ucs_log_func_rc_t hear(const char *file, unsigned line, const char *function, ucs_log_level_t level,
			      const ucs_log_component_config_t *conf, const char *message, va_list ap)
{
	(void)function, (void)conf;
	char text[sizeof said];
	vsnprintf(text, sizeof text, message, ap);
	if (level <= UCS_LOG_LEVEL_ERROR)
		memcpy(said, text, sizeof said);
	if (level == UCS_LOG_LEVEL_FATAL || verbose)
		fprintf(stderr, "ucx: %s:%u: %s\n", file, line, text);
	return UCS_LOG_FUNC_RC_STOP;
}

// By variables, for ucp_config_modify reaches not all of these (1.13.1). Whoever
// has set one knows better.
static void prepare(void)
{
	static const char *const set[][2] = {
		// TCP that sends from memory in place completes some sends twice when a
		// peer dies in mid-load, and aborts (seen with 1.13.1). Rendezvous over RDMA
		// and within a host is not concerned.
		{"UCX_ZCOPY_THRESH", "inf"},
		{"UCX_TCP_PUT_ENABLE", "n"},
		{"UCX_TCP_TX_SEG_SIZE", "64k"}, // of 8k gets over TCP are half as fast
		// Without this, what peers on a host move goes over TCP. It says that memory
		// can be taken away from them, which it is not: they only read.
		{"UCX_CMA_MEMORY_INVALIDATE", "y"},
	};
	for (size_t i = 0; i < sizeof set / sizeof *set; i++)
		setenv(set[i][0], set[i][1], 0);
	verbose = getenv("UCX_LOG_LEVEL") != NULL;
	ucs_log_push_handler(hear);
}

const char *tu_text(int status) { return ucs_status_string(status); }

const char *tu_explain(int status)
{
	static __thread char text[sizeof said + 64];
	snprintf(text, sizeof text, said[0] ? "%s: %s" : "%s", ucs_status_string(status), said);
	said[0] = 0;
	return text;
}

int tu_open(const char *transports, tu_context **out)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	pthread_once(&once, prepare);
	ucp_config_t *config;
	ucs_status_t s = ucp_config_read(NULL, NULL, &config);
	if (s != UCS_OK)
		return s;
	if (transports[0])
		s = ucp_config_modify(config, "TLS", transports);
	if (s == UCS_OK) {
		ucp_params_t params = {
			.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED | UCP_PARAM_FIELD_NAME,
			.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
			.mt_workers_shared = 1,
			.name = "terrace",
		};
		s = ucp_init(&params, config, (ucp_context_h *)out);
	}
	ucp_config_release(config);
	return s;
}

// destroys says that UCX can destroy a worker. Before 1.14 it aborts if a connection
// of the worker's was not set up yet (openucx/ucx pull request 8175); such a worker
// is left to the end of the process, and nobody moves it on.
static int destroys(void)
{
	unsigned major, minor, release;
	ucp_get_version(&major, &minor, &release);
	return major > 1 || minor >= 14;
}

void tu_close(tu_context *c)
{
	if (destroys())
		ucp_cleanup((ucp_context_h)c);
}

// end tells that nothing writes g's memory any more.
static void end(struct get *g, ucs_status_t status)
{
	if (g->link) {
		*g->link = g->next;
		if (g->next)
			g->next->link = g->link;
		g->link = NULL;
	}
	g->key += TU_GETS; // late answers do not find it
	g->status = status;
	g->next = g->w->over;
	g->w->over = g;
}

// asked is the get that waits for an answer with this key, or NULL.
static struct get *asked(tu_worker *w, uint64_t key)
{
	struct get *g = &w->gets[key % TU_GETS];
	return g->link && g->key == key ? g : NULL;
}

static void on_sent(void *request, ucs_status_t status, void *arg)
{
	struct message *m = arg;
	struct get *g = status != UCS_OK ? asked(m->w, m->ask.id) : NULL;
	if (g)
		end(g, status);
	*m->link = m->next;
	if (m->next)
		m->next->link = m->link;
	free(m);
	if (request)
		ucp_request_free(request);
}

// dispatch sends m, which becomes UCX's, and body, which stays as it is as long as
// the endpoint, or until its receiver has it.
static void dispatch(tu_worker *w, ucp_ep_h ep, unsigned id, struct message *m, size_t header, const void *body, size_t len)
{
	m->w = w;
	m->ep = ep;
	m->next = w->sent;
	if (m->next)
		m->next->link = &m->next;
	m->link = &w->sent;
	w->sent = m;
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
		.cb.send = on_sent,
		.user_data = m,
		.flags = id == ASK ? UCP_AM_SEND_FLAG_REPLY : 0,
	};
	ucs_status_ptr_t r = ucp_am_send_nbx(ep, id, &m->ask, header, body, len, &param);
	if (!UCS_PTR_IS_PTR(r)) // over already, and on_sent is not called
		on_sent(NULL, UCS_PTR_STATUS(r), m);
}

static ucs_status_t on_ask(void *arg, const void *header, size_t header_len, void *data, size_t len,
			   const ucp_am_recv_param_t *param)
{
	(void)data, (void)len;
	tu_worker *w = arg;
	struct ask a;
	if (header_len != sizeof a || !(param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP))
		return UCS_OK;
	memcpy(&a, header, sizeof a);
	int within = a.len <= w->size && a.off <= w->size - a.len;
	struct message *m = need(sizeof *m);
	m->answer = (struct answer){.id = a.id, .status = within ? UCS_OK : UCS_ERR_OUT_OF_RANGE};
	dispatch(w, param->reply_ep, ANSWER, m, sizeof m->answer, within ? w->base + a.off : NULL, within ? a.len : 0);
	return UCS_OK;
}

static void on_received(void *request, ucs_status_t status, size_t len, void *arg)
{
	struct get *g = arg;
	end(g, status == UCS_OK && len != g->len ? UCS_ERR_MESSAGE_TRUNCATED : status);
	ucp_request_free(request);
}

static ucs_status_t on_answer(void *arg, const void *header, size_t header_len, void *data, size_t len,
			      const ucp_am_recv_param_t *param)
{
	tu_worker *w = arg;
	struct answer a;
	if (header_len != sizeof a)
		return UCS_OK;
	memcpy(&a, header, sizeof a);
	struct get *g = asked(w, a.id);
	if (!g)
		return UCS_OK;
	if (a.status != UCS_OK || len != g->len) {
		end(g, a.status < 0 ? (ucs_status_t)a.status : UCS_ERR_MESSAGE_TRUNCATED);
		return UCS_OK;
	}
	if (!(param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) {
		if (len > 0)
			memcpy(g->dst, data, len);
		end(g, UCS_OK);
		return UCS_OK;
	}
	// From here on UCX writes dst, and says when that is over.
	*g->link = g->next;
	if (g->next)
		g->next->link = g->link;
	g->link = NULL;
	ucp_request_param_t recv = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
		.cb.recv_am = on_received,
		.user_data = g,
	};
	ucs_status_ptr_t r = ucp_am_recv_data_nbx(w->worker, data, g->dst, len, &recv);
	if (!UCS_PTR_IS_PTR(r))
		end(g, UCS_PTR_STATUS(r));
	return UCS_OK;
}

static ucs_status_t handle(tu_worker *w, unsigned id, ucp_am_recv_callback_t cb)
{
	ucp_am_handler_param_t param = {
		.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS | UCP_AM_HANDLER_PARAM_FIELD_CB |
			      UCP_AM_HANDLER_PARAM_FIELD_ARG,
		.id = id,
		.flags = UCP_AM_FLAG_WHOLE_MSG,
		.cb = cb,
		.arg = w,
	};
	return ucp_worker_set_am_recv_handler(w->worker, &param);
}

int tu_worker_open(tu_context *c, uint64_t base, uint64_t size, tu_worker **out)
{
	tu_worker *w = need(sizeof *w);
	w->base = (const char *)base;
	w->size = size;
	for (int i = TU_GETS - 1; i >= 0; i--) {
		w->gets[i] = (struct get){.w = w, .key = i, .next = w->free};
		w->free = &w->gets[i];
	}
	ucp_worker_params_t params = {
		.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
		.thread_mode = UCS_THREAD_MODE_SINGLE,
	};
	ucs_status_t s = ucp_worker_create((ucp_context_h)c, &params, &w->worker);
	if (s != UCS_OK) {
		free(w);
		return s;
	}
	s = ucp_worker_get_efd(w->worker, &w->fd);
	if (s == UCS_OK)
		s = base ? handle(w, ASK, on_ask) : handle(w, ANSWER, on_answer);
	if (s != UCS_OK)
		tu_worker_close(w);
	else
		*out = w;
	return s;
}

static void disconnect(ucp_ep_h ep)
{
	ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE};
	ucs_status_ptr_t r = ucp_ep_close_nbx(ep, &param);
	if (UCS_PTR_IS_PTR(r))
		ucp_request_free(r);
}

// quiet moves on what is under way until nothing that was sent is, or for ms.
static int quiet(tu_worker *w, long ms)
{
	struct timespec t, began;
	clock_gettime(CLOCK_MONOTONIC, &began);
	while (w->sent) {
		struct pollfd fd = {.fd = w->fd, .events = POLLIN};
		if (!ucp_worker_progress(w->worker) && ucp_worker_arm(w->worker) == UCS_OK)
			poll(&fd, 1, 1);
		clock_gettime(CLOCK_MONOTONIC, &t);
		if ((t.tv_sec - began.tv_sec) * 1000 + (t.tv_nsec - began.tv_nsec) / 1000000 > ms)
			break;
	}
	return !w->sent;
}

// uncut is something that was sent on a connection that was not cut.
static struct message *uncut(tu_worker *w)
{
	struct message *m = w->sent;
	while (m && m->cut)
		m = m->next;
	return m;
}

int tu_unserve(tu_worker *w)
{
	w->base = NULL, w->size = 0;
	if (quiet(w, 100))
		return UCS_OK;
	// Some do not take what they have asked for. UCX must not lose a worker with
	// such requests.
	for (struct message *m; (m = uncut(w));) {
		ucp_ep_h ep = m->ep;
		for (; m; m = m->next)
			m->cut |= m->ep == ep;
		disconnect(ep);
	}
	return quiet(w, 2000) ? UCS_OK : UCS_ERR_BUSY;
}

void tu_worker_close(tu_worker *w)
{
	if (w->address)
		ucp_worker_release_address(w->worker, w->address);
	if (!destroys())
		return;
	ucp_worker_destroy(w->worker);
	free(w);
}

void tu_wake(tu_worker *w) { ucp_worker_signal(w->worker); }

int tu_address(tu_worker *w, const void **out, size_t *len)
{
	ucs_status_t s = ucp_worker_get_address(w->worker, &w->address, len);
	*out = w->address;
	return s;
}

static void end_asked(tu_peer *p, ucs_status_t status)
{
	while (p->asked)
		end(p->asked, status);
}

static void on_failure(void *arg, ucp_ep_h ep, ucs_status_t status)
{
	(void)ep;
	tu_peer *p = arg;
	p->failed = status;
	end_asked(p, status);
}

int tu_connect(tu_worker *w, const void *address, tu_peer **out)
{
	tu_peer *p = need(sizeof *p);
	ucp_ep_params_t params = {
		.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
			      UCP_EP_PARAM_FIELD_ERR_HANDLER,
		.address = address,
		.err_mode = UCP_ERR_HANDLING_MODE_PEER,
		.err_handler = {.cb = on_failure, .arg = p},
	};
	ucs_status_t s = ucp_ep_create(w->worker, &params, &p->ep);
	if (s != UCS_OK)
		free(p);
	else
		*out = p;
	return s;
}

void tu_disconnect(tu_peer *p)
{
	disconnect(p->ep);
	end_asked(p, UCS_ERR_CANCELED);
}

void tu_forget(tu_peer *p) { free(p); }

static void start(tu_worker *w, const tu_post *post)
{
	tu_peer *p = post->peer;
	struct get *g = w->free;
	w->free = g->next;
	g->id = post->id;
	g->dst = (void *)post->dst;
	g->len = post->len;
	g->next = p->asked;
	if (g->next)
		g->next->link = &g->next;
	g->link = &p->asked;
	p->asked = g;
	if (p->failed != UCS_OK) {
		end(g, p->failed);
		return;
	}
	struct message *m = need(sizeof *m);
	m->ask = (struct ask){.id = g->key, .off = post->off, .len = post->len};
	dispatch(w, p->ep, ASK, m, sizeof m->ask, NULL, 0);
}

int tu_turn(tu_worker *w, const tu_post *posts, int n, tu_over *over, int max, int wait)
{
	for (int i = 0; i < n; i++)
		start(w, &posts[i]);
	int busy = ucp_worker_progress(w->worker);
	for (int i = 0; busy && !w->over && (wait || i < 16); i++)
		busy = ucp_worker_progress(w->worker);
	if (wait && !w->over) {
		ucs_status_t s = ucp_worker_arm(w->worker);
		struct pollfd fd = {.fd = w->fd, .events = POLLIN};
		if (s != UCS_ERR_BUSY)
			poll(&fd, 1, s == UCS_OK ? -1 : 10); // what cannot be armed is looked at again and again
		ucp_worker_progress(w->worker);
	}
	int k = 0;
	for (; k < max && w->over; k++) {
		struct get *g = w->over;
		w->over = g->next;
		over[k] = (tu_over){.id = g->id, .status = g->status};
		g->next = w->free;
		w->free = g;
	}
	return k;
}
