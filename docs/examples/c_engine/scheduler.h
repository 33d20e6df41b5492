/* A scheduler and a block manager: continuous batching over a paged KV cache, first come, first served.
 *
 * A step is either prefills, of whole prompts, or one decode of everybody who runs. When the pool is empty the latest
 * arrival is preempted: its blocks are freed, and its tokens are computed again when it returns.
 */
#ifndef SCHEDULER_H
#define SCHEDULER_H

#include <stdbool.h>

typedef struct {
    int num_blocks, block_size, max_num_seqs, max_num_batched_tokens, max_model_len;
} Config;

typedef struct {
    char *id;
    long arrival; /* the order in which requests came */
    int *tokens;  /* prompt, then outputs */
    int length;   /* of tokens */
    int prompt_length;
    int length_max; /* it ends there at the latest */
    int stop_token; /* -1 without one */
    int computed;   /* positions whose KV is in its blocks */
    int planned;    /* the same once the step in hand is run; equal to `computed` when it does not run */
    int *table;     /* block of each block_size positions, in order */
    int blocks;     /* of table */
} Request;

typedef struct {
    Request **requests;
    int count, capacity;
} Queue;

typedef struct {
    Request *request;
    int counted, free; /* blocks counted as needed, and free, when it was chosen */
    const Request *asked_by;
} Victim;

typedef struct {
    Config config;
    int *free; /* the free list; the last is handed out first */
    int free_count;
    Queue waiting, running; /* both in order of arrival */
    long step;              /* schedule calls so far */
    long arrivals;
    int preemptions;        /* so far */
    Victim *victims;        /* of the last step, in the order chosen */
    int victim_count;
} Scheduler;

/* Why the engine will not run with a configuration; NULL when it will. */
const char *scheduler_refuses(const Config *config);
Scheduler *scheduler_new(const Config *config);
void scheduler_free(Scheduler *scheduler);

/* Why a request is not served; NULL, and it is queued, when it is. `stop`: the token that ends it, -1 for none. */
const char *scheduler_add(Scheduler *, const char *id, const int *prompt, int prompt_length, int max_tokens, int stop);
void scheduler_abort(Scheduler *, const char *id);

/* Decides a step: who runs is on the running queue with planned > computed. */
void scheduler_step(Scheduler *);
/* Takes the token of a request that ran. True when that was its last: scheduler_finish is next. */
bool request_take(Request *, int token);
/* Frees the request and its blocks. */
void scheduler_finish(Scheduler *, Request *);
Request *scheduler_find(const Queue *, const char *id);

#endif
