/* The engine's end of the wire (docs/reference/wire-protocol.md): a line in, a line out, until the input ends. */
#define _GNU_SOURCE /* getline */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "json.h"
#include "scheduler.h"

enum { PROTOCOL = 1 };

static const char CAPABILITIES[] =
    "{\"engine\":\"c-engine\",\"version\":\"1.0\",\"features\":[\"abort\",\"length_limit\",\"recompute\",\"snapshot\","
    "\"stop_token\",\"token_budget\",\"usage\"],\"refuses_outgrowing\":true}";

static Scheduler *scheduler;

/* ---------------------------------------------------------------------------------------------- answers */

/* The answer to every call starts so; `end` closes it. */
static void begin(Buffer *out, const Json *call, const char *answer) {
    put(out, "{\"answer\":\"%s\",\"id\":%ld", answer, json_int(call, "id", -1));
}

static void end(Buffer *out) { put(out, "}"); }

static void fail(Buffer *out, const Json *call, const char *answer, const char *message) {
    begin(out, call, answer);
    put(out, ",\"message\":");
    put_text(out, message);
    end(out);
}

/* The cheap figures, with every answer: so they need not be asked for. */
static void put_usage(Buffer *out) {
    put(out, ",\"usage\":{\"free_blocks\":%d,\"running\":%d,\"waiting\":%d,\"preemptions\":%d}", scheduler->free_count,
        scheduler->running.count, scheduler->waiting.count, scheduler->preemptions);
}

static void done(Buffer *out, const Json *call, const char *answer) {
    begin(out, call, answer);
    put_usage(out);
    end(out);
}

/* ------------------------------------------------------------------------------------------------ calls */

static void make(Buffer *out, const Json *call) {
    const Json *fields = json_member(call, "config");
    Config config = {
        .num_blocks = (int)json_int(fields, "num_blocks", 0),
        .block_size = (int)json_int(fields, "block_size", 0),
        .max_num_seqs = (int)json_int(fields, "max_num_seqs", 0),
        .max_num_batched_tokens = (int)json_int(fields, "max_num_batched_tokens", 0),
        .max_model_len = (int)json_int(fields, "max_model_len", 0),
    };
    const char *refusal = scheduler_refuses(&config);
    const Json *options = json_member(fields, "engine_options");
    if (options != NULL && options->count) refusal = "this engine has no engine_options";
    const Json *groups = json_array(fields, "kv_cache_groups");
    if (groups != NULL && groups->count) refusal = "kv_cache_groups: this engine has one block table per sequence";
    if (refusal != NULL) {
        fail(out, call, "refused", refusal);
        return;
    }
    scheduler_free(scheduler);
    scheduler = scheduler_new(&config);
    begin(out, call, "make");
    put(out, ",\"capabilities\":%s", CAPABILITIES);
    put_usage(out);
    end(out);
}

static void add_request(Buffer *out, const Json *call) {
    const Json *request = json_member(call, "request");
    const Json *prompt = json_array(request, "prompt");
    const char *id = json_text(request, "request_id");
    if (prompt == NULL || id == NULL) {
        fail(out, call, "unable", "a request needs request_id and prompt");
        return;
    }
    int *tokens = allocate(prompt->count * sizeof *tokens), length = 0;
    for (const Json *token = prompt->items; token != NULL; token = token->next) tokens[length++] = (int)token->number;
    const Json *encoder_items = json_array(request, "encoder_items");
    const char *refusal =
        json_int(request, "n", 1) != 1                      ? "n must be 1: this engine does not fork sequences"
        : encoder_items != NULL && encoder_items->count > 0 ? "this engine has no encoder"
                                                            : scheduler_add(scheduler, id, tokens, length,
                                                                            (int)json_int(request, "max_tokens", 0),
                                                                            (int)json_int(request, "stop_token", -1));
    free(tokens);
    if (refusal != NULL) {
        fail(out, call, "refused", refusal);
    } else {
        done(out, call, "add_request");
    }
}

static void put_sequence(Buffer *out, const Request *request) {
    put(out, "{\"request_id\":");
    put_text(out, request->id);
    put(out, ",\"first\":%d,\"num_tokens\":%d,\"block_tables\":[", request->computed,
        request->planned - request->computed);
    put_ints(out, request->table, request->blocks);
    put(out, "],\"token_ids\":");
    put_ints(out, request->tokens + request->computed, request->planned - request->computed);
    put(out, "}");
}

static void put_victim(Buffer *out, const Victim *victim) {
    put(out, "{\"request_id\":");
    put_text(out, victim->request->id);
    put(out, ",\"mode\":\"recompute\",\"blocks_counted\":%d,\"blocks_free\":%d,\"asked_by\":", victim->counted,
        victim->free);
    put_text(out, victim->asked_by->id);
    put(out, "}");
}

static void schedule(Buffer *out, const Json *call) {
    long step = scheduler->step;
    scheduler_step(scheduler);
    begin(out, call, "schedule");
    put(out, ",\"plan\":{\"step\":%ld,\"sequences\":[", step);
    const char *comma = "";
    for (int at = 0; at < scheduler->running.count; at++) {
        const Request *request = scheduler->running.requests[at];
        if (request->planned == request->computed) continue;
        put(out, "%s", comma);
        put_sequence(out, request);
        comma = ",";
    }
    put(out, "],\"preempted\":[");
    for (int at = 0; at < scheduler->victim_count; at++) {
        put(out, at ? "," : "");
        put_victim(out, &scheduler->victims[at]);
    }
    put(out, "]}");
    put_usage(out);
    end(out);
}

static void put_finished(Buffer *out, const Request *request) {
    put(out, "{\"request_id\":");
    put_text(out, request->id);
    put(out, ",\"outputs\":[");
    put_ints(out, request->tokens + request->prompt_length, request->length - request->prompt_length);
    put(out, "],\"reason\":\"%s\"}",
        request->tokens[request->length - 1] == request->stop_token ? "stop" : "length");
}

static void commit(Buffer *out, const Json *call) {
    const char *comma = "";
    begin(out, call, "commit");
    put(out, ",\"result\":{\"finished\":[");
    const Json *sampled = json_array(call, "sampled");
    for (const Json *one = sampled == NULL ? NULL : sampled->items; one != NULL; one = one->next) {
        const char *id = json_text(one, "request_id");
        const Json *tokens = json_array(one, "tokens");
        Request *request = id == NULL ? NULL : scheduler_find(&scheduler->running, id);
        if (request == NULL || request->planned == request->computed) continue; /* aborted since it ran */
        if (tokens == NULL || tokens->count != 1) continue;                     /* no drafts, hence one token */
        if (request_take(request, (int)tokens->items->number)) {
            put(out, "%s", comma);
            put_finished(out, request);
            comma = ",";
            scheduler_finish(scheduler, request);
        }
    }
    put(out, "]}");
    put_usage(out);
    end(out);
}

static void put_ids(Buffer *out, const char *name, const Queue *queue) {
    put(out, ",\"%s\":[", name);
    for (int at = 0; at < queue->count; at++) {
        put(out, at ? "," : "");
        put_text(out, queue->requests[at]->id);
    }
    put(out, "]");
}

/* The books as they are kept: the free list, and the table of everybody who runs. */
static void snapshot(Buffer *out, const Json *call) {
    begin(out, call, "snapshot");
    put(out, ",\"snapshot\":{\"free\":");
    put_ints(out, scheduler->free, scheduler->free_count);
    put(out, ",\"held\":[");
    for (int at = 0; at < scheduler->running.count; at++) {
        const Request *request = scheduler->running.requests[at];
        put(out, "%s{\"request_id\":", at ? "," : "");
        put_text(out, request->id);
        put(out, ",\"tables\":[");
        put_ints(out, request->table, request->blocks);
        put(out, "]}");
    }
    put(out, "]");
    put_ids(out, "waiting", &scheduler->waiting);
    put_ids(out, "running", &scheduler->running);
    put(out, "}");
    end(out);
}

/* --------------------------------------------------------------------------------------------- the wire */

static void answer(Buffer *out, const Json *call) {
    const char *name = json_text(call, "call");
    if (name == NULL) {
        fail(out, call, "unable", "not a call of the wire protocol");
    } else if (strcmp(name, "hello") == 0) {
        begin(out, call, "hello");
        put(out, ",\"protocol\":%d,\"engine\":\"c-engine\",\"version\":\"1.0\"", PROTOCOL);
        end(out);
    } else if (strcmp(name, "make") == 0) {
        make(out, call);
    } else if (scheduler == NULL) {
        fail(out, call, "unable", "there is no engine; make comes first");
    } else if (strcmp(name, "add_request") == 0) {
        add_request(out, call);
    } else if (strcmp(name, "abort_request") == 0) {
        const char *id = json_text(call, "request_id");
        scheduler_abort(scheduler, id == NULL ? "" : id);
        done(out, call, name);
    } else if (strcmp(name, "schedule") == 0) {
        schedule(out, call);
    } else if (strcmp(name, "commit") == 0) {
        commit(out, call);
    } else if (strcmp(name, "snapshot") == 0) {
        snapshot(out, call);
    } else if (strcmp(name, "close") == 0) {
        scheduler_free(scheduler);
        scheduler = NULL;
        begin(out, call, name);
        end(out);
    } else {
        fail(out, call, "unable", "this engine does not have that call");
    }
}

int main(void) {
    char *line = NULL;
    size_t capacity = 0;
    Buffer out = {0};
    while (getline(&line, &capacity, stdin) > 0) {
        Json *call = json_parse(line);
        out.length = 0;
        answer(&out, call);
        put(&out, "\n");
        fwrite(out.bytes, 1, out.length, stdout);
        fflush(stdout); /* or the harness waits for ever */
        json_free(call);
    }
    scheduler_free(scheduler);
    free(out.bytes);
    free(line);
    return 0;
}
