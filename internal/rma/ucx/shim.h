// What of UCX the package uses, in calls that keep no pointer to Go memory but
// for destinations of gets. Calls that can fail return 0 or a negative status of
// UCX. All calls for one worker are made by one thread, but for tu_wake.
#include <stddef.h>
#include <stdint.h>

#define TU_GETS 4096 // of a worker at most under way and not told

typedef struct tu_context tu_context; // a ucp_context
typedef struct tu_worker tu_worker;
typedef struct tu_peer tu_peer;

typedef struct {
	uint64_t id; // comes back in a tu_over
	tu_peer *peer;
	uint64_t dst, len, off; // dst is an address, off within the peer's region
} tu_post;

typedef struct {
	uint64_t id;
	int status;
} tu_over;

// Text of a status; tu_explain adds what UCX has last said about an error on this
// thread, in a buffer of the thread's.
const char *tu_explain(int status);
const char *tu_text(int status);

int tu_open(const char *transports, tu_context **out);
void tu_close(tu_context *c);

// A worker with a region, of size bytes from base, serves it; one without gets.
int tu_worker_open(tu_context *c, uint64_t base, uint64_t size, tu_worker **out);
int tu_unserve(tu_worker *w); // nothing of the region is read any more; takes up to 2.1 s
void tu_worker_close(tu_worker *w);
int tu_address(tu_worker *w, const void **out, size_t *len); // which stay the worker's
void tu_wake(tu_worker *w); // ends a tu_turn that waits, or the next one that would

int tu_connect(tu_worker *w, const void *address, tu_peer **out);
void tu_disconnect(tu_peer *p); // its gets are over in some of the next turns
void tu_forget(tu_peer *p);     // after tu_disconnect, when none of its gets is under way

// tu_turn starts the n gets of posts, moves on all that is under way, and fills
// in up to max gets that are over; it returns how many. If wait, it sleeps until
// something happens or tu_wake was called, unless some are over.
int tu_turn(tu_worker *w, const tu_post *posts, int n, tu_over *over, int max, int wait);
