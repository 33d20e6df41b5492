#include "scheduler.h"

#include <stdlib.h>
#include <string.h>

#include "json.h"

/* ------------------------------------------------------------------------------------------------ queues */

static void enqueue(Queue *queue, Request *request) {
    if (queue->count == queue->capacity) {
        queue->capacity = 2 * queue->capacity + 4;
        queue->requests = reallocate(queue->requests, (size_t)queue->capacity * sizeof *queue->requests);
    }
    int at = queue->count++;
    for (; at > 0 && queue->requests[at - 1]->arrival > request->arrival; at--) {
        queue->requests[at] = queue->requests[at - 1];
    }
    queue->requests[at] = request;
}

static void dequeue(Queue *queue, const Request *request) {
    int at = 0;
    while (queue->requests[at] != request) at++;
    queue->count--;
    for (; at < queue->count; at++) queue->requests[at] = queue->requests[at + 1];
}

Request *scheduler_find(const Queue *queue, const char *id) {
    for (int at = 0; at < queue->count; at++) {
        if (strcmp(queue->requests[at]->id, id) == 0) return queue->requests[at];
    }
    return NULL;
}

static void request_free(Request *request) {
    free(request->id);
    free(request->tokens);
    free(request->table);
    free(request);
}

/* ------------------------------------------------------------------------------------------------ blocks */

static int blocks_for(const Scheduler *scheduler, int positions) {
    return (positions + scheduler->config.block_size - 1) / scheduler->config.block_size;
}

/* Blocks that a request lacks to hold all of its tokens but none beyond. */
static int blocks_lacking(const Scheduler *scheduler, const Request *request) {
#ifdef BUG_ONE_BLOCK_EACH
    /* A block for whoever decodes, needed or not: vLLM issue 8007. */
    if (request->computed) return 1;
#endif
    return blocks_for(scheduler, request->length) - request->blocks;
}

static void grow_table(Scheduler *scheduler, Request *request) {
    while (request->blocks < blocks_for(scheduler, request->length)) {
        request->table[request->blocks++] = scheduler->free[--scheduler->free_count];
    }
}

static void free_blocks(Scheduler *scheduler, Request *request) {
    while (request->blocks) scheduler->free[scheduler->free_count++] = request->table[--request->blocks];
}

/* ---------------------------------------------------------------------------------------------- requests */

const char *scheduler_refuses(const Config *config) {
    if (config->num_blocks < 1 || config->block_size < 1 || config->max_num_seqs < 1) {
        return "num_blocks, block_size and max_num_seqs must be at least 1";
    }
    if (config->max_model_len < 2) return "max_model_len must be at least 2: a prompt and an output";
    if (config->max_num_batched_tokens < config->max_model_len) {
        return "max_num_batched_tokens must be at least max_model_len: a prompt is not cut into chunks";
    }
    if (config->max_num_batched_tokens < config->max_num_seqs) {
        return "max_num_batched_tokens must be at least max_num_seqs: everybody decodes in the same step";
    }
    return NULL;
}

Scheduler *scheduler_new(const Config *config) {
    Scheduler *scheduler = allocate(sizeof *scheduler);
    *scheduler = (Scheduler){.config = *config};
    scheduler->free = allocate((size_t)config->num_blocks * sizeof *scheduler->free);
    scheduler->victims = allocate((size_t)config->max_num_seqs * sizeof *scheduler->victims);
    for (int block = config->num_blocks; block-- > 0;) scheduler->free[scheduler->free_count++] = block;
    return scheduler;
}

static void queue_free(Queue *queue) {
    for (int at = 0; at < queue->count; at++) request_free(queue->requests[at]);
    free(queue->requests);
}

void scheduler_free(Scheduler *scheduler) {
    if (scheduler == NULL) return;
    queue_free(&scheduler->waiting);
    queue_free(&scheduler->running);
    free(scheduler->free);
    free(scheduler->victims);
    free(scheduler);
}

const char *scheduler_add(Scheduler *scheduler, const char *id, const int *prompt, int prompt_length, int max_tokens,
                          int stop) {
    const Config *config = &scheduler->config;
    if (prompt_length < 1 || max_tokens < 1) return "the prompt and max_tokens must be at least 1";
    if (prompt_length >= config->max_model_len) return "the prompt leaves no room for an output under max_model_len";
    int length_max = config->max_model_len;
    if (max_tokens < length_max - prompt_length) length_max = prompt_length + max_tokens;
    /* The last token is sampled and never computed. */
    if (blocks_for(scheduler, length_max - 1) > config->num_blocks) return "prompt and outputs can never fit the pool";

    Request *request = allocate(sizeof *request);
    *request = (Request){.arrival = scheduler->arrivals++, .stop_token = stop};
    request->id = allocate(strlen(id) + 1);
    strcpy(request->id, id);
    request->tokens = allocate((size_t)length_max * sizeof *request->tokens);
    memcpy(request->tokens, prompt, (size_t)prompt_length * sizeof *prompt);
    request->length = request->prompt_length = prompt_length;
    request->length_max = length_max;
    request->table = allocate((size_t)blocks_for(scheduler, length_max) * sizeof *request->table);
    enqueue(&scheduler->waiting, request);
    return NULL;
}

void scheduler_abort(Scheduler *scheduler, const char *id) {
    Request *request = scheduler_find(&scheduler->running, id);
    if (request != NULL) {
        dequeue(&scheduler->running, request);
#ifndef BUG_LEAK_ON_ABORT
        free_blocks(scheduler, request);
#endif
    } else if ((request = scheduler_find(&scheduler->waiting, id)) != NULL) {
        dequeue(&scheduler->waiting, request);
    } else {
        return;
    }
    request_free(request);
}

/* ------------------------------------------------------------------------------------------------- steps */

/* Lets in whoever is first for as long as they fit; nobody overtakes. False when nobody came. */
static bool admit(Scheduler *scheduler) {
    int budget = scheduler->config.max_num_batched_tokens;
    bool admitted = false;
    while (scheduler->waiting.count && scheduler->running.count < scheduler->config.max_num_seqs) {
        Request *head = scheduler->waiting.requests[0];
        if (head->length > budget || blocks_for(scheduler, head->length) > scheduler->free_count) break;
        dequeue(&scheduler->waiting, head);
        enqueue(&scheduler->running, head);
        grow_table(scheduler, head);
        head->planned = head->length;
        budget -= head->length;
        admitted = true;
    }
    return admitted;
}

/* Back to the queue, in its place by arrival, with all its tokens and none of its blocks. */
static void preempt(Scheduler *scheduler, Request *victim, const Request *asked_by, int counted) {
#ifdef BUG_CRASH_ON_PREEMPTION
    abort();
#endif
    scheduler->victims[scheduler->victim_count++] =
        (Victim){.request = victim, .counted = counted, .free = scheduler->free_count, .asked_by = asked_by};
    scheduler->preemptions++;
    dequeue(&scheduler->running, victim);
    free_blocks(scheduler, victim);
    victim->computed = victim->planned = 0;
    enqueue(&scheduler->waiting, victim);
}

/* Everybody who runs computes one position; the oldest get their blocks first, from the youngest if need be. */
static void decode(Scheduler *scheduler) {
    for (int at = 0; at < scheduler->running.count; at++) {
        Request *request = scheduler->running.requests[at];
        int lacking;
        while ((lacking = blocks_lacking(scheduler, request)) > scheduler->free_count) {
            Request *youngest = scheduler->running.requests[scheduler->running.count - 1];
            preempt(scheduler, youngest, request, lacking);
            if (youngest == request) return; /* it was the last of the queue */
        }
        grow_table(scheduler, request);
        request->planned = request->length;
    }
}

void scheduler_step(Scheduler *scheduler) {
    scheduler->victim_count = 0;
    if (!admit(scheduler)) decode(scheduler);
    scheduler->step++;
}

bool request_take(Request *request, int token) {
    request->computed = request->planned;
    request->tokens[request->length++] = token;
    return token == request->stop_token || request->length == request->length_max;
}

void scheduler_finish(Scheduler *scheduler, Request *request) {
    dequeue(&scheduler->running, request);
    free_blocks(scheduler, request);
    request_free(request);
}
