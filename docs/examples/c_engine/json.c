#include "json.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEPTH_MAX = 32 };

void *allocate(size_t bytes) { return reallocate(NULL, bytes); }

void *reallocate(void *old, size_t bytes) {
    void *memory = realloc(old, bytes ? bytes : 1);
    if (memory == NULL) {
        fputs("out of memory\n", stderr);
        exit(1);
    }
    return memory;
}

/* ---------------------------------------------------------------------------------------------- reading */

static char *skip_space(char *at) {
    while (*at == ' ' || *at == '\t' || *at == '\r' || *at == '\n') at++;
    return at;
}

static bool hex4(const char *at, uint32_t *code) {
    *code = 0;
    for (int digit = 0; digit < 4; digit++) {
        char c = at[digit];
        int value = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (value < 0) return false;
        *code = *code << 4 | (uint32_t)value;
    }
    return true;
}

static char *write_utf8(char *to, uint32_t code) {
    if (code < 0x80) {
        *to++ = (char)code;
    } else if (code < 0x800) {
        *to++ = (char)(0xC0 | code >> 6);
        *to++ = (char)(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
        *to++ = (char)(0xE0 | code >> 12);
        *to++ = (char)(0x80 | (code >> 6 & 0x3F));
        *to++ = (char)(0x80 | (code & 0x3F));
    } else {
        *to++ = (char)(0xF0 | code >> 18);
        *to++ = (char)(0x80 | (code >> 12 & 0x3F));
        *to++ = (char)(0x80 | (code >> 6 & 0x3F));
        *to++ = (char)(0x80 | (code & 0x3F));
    }
    return to;
}

/* One escape, from behind its backslash; an escape is never shorter than what it stands for. */
static char *read_escape(char *at, char **to) {
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    const char *name = *at ? strchr(names, *at) : NULL;
    if (name != NULL) {
        *(*to)++ = values[name - names];
        return at + 1;
    }
    uint32_t code, low;
    if (*at != 'u' || !hex4(at + 1, &code) || code == 0) return NULL;
    at += 5;
    if (code >= 0xD800 && code < 0xDC00) {
        if (at[0] != '\\' || at[1] != 'u' || !hex4(at + 2, &low) || low < 0xDC00 || low > 0xDFFF) return NULL;
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
        at += 6;
    }
    *to = write_utf8(*to, code);
    return at;
}

/* A string, decoded where it stands. */
static char *read_string(char *at, const char **text) {
    if (*at != '"') return NULL;
    char *to = ++at;
    *text = to;
    while (*at != '"') {
        if ((unsigned char)*at < 0x20) return NULL;
        if (*at != '\\') {
            *to++ = *at++;
        } else if ((at = read_escape(at + 1, &to)) == NULL) {
            return NULL;
        }
    }
    *to = '\0';
    return at + 1;
}

static char *read_value(char *at, Json *into, int depth);

/* What stands between the brackets of an array or object. */
static char *read_items(char *at, Json *into, char end, int depth) {
    Json **last = &into->items;
    at = skip_space(at);
    if (*at == end) return at + 1;
    for (;;) {
        Json *item = *last = allocate(sizeof *item);
        *item = (Json){0};
        last = &item->next;
        into->count++;
        if (end == '}') {
            at = read_string(skip_space(at), &item->key);
            if (at == NULL || *(at = skip_space(at)) != ':') return NULL;
            at++;
        }
        at = read_value(skip_space(at), item, depth + 1);
        if (at == NULL) return NULL;
        at = skip_space(at);
        if (*at == end) return at + 1;
        if (*at++ != ',') return NULL;
    }
}

static char *read_word(char *at, const char *word) {
    size_t length = strlen(word);
    return strncmp(at, word, length) == 0 ? at + length : NULL;
}

static char *read_value(char *at, Json *into, int depth) {
    if (depth > DEPTH_MAX) return NULL;
    switch (*at) {
    case '{':
        into->type = JSON_OBJECT;
        return read_items(at + 1, into, '}', depth);
    case '[':
        into->type = JSON_ARRAY;
        return read_items(at + 1, into, ']', depth);
    case '"':
        into->type = JSON_STRING;
        return read_string(at, &into->text);
    case 't':
    case 'f':
        into->type = JSON_BOOL;
        into->truth = *at == 't';
        return read_word(at, into->truth ? "true" : "false");
    case 'n':
        into->type = JSON_NULL;
        return read_word(at, "null");
    default:
        into->type = JSON_NUMBER;
        char *end;
        into->number = strtod(at, &end);
        return end == at ? NULL : end;
    }
}

static void free_items(Json *item) {
    while (item != NULL) {
        Json *next = item->next;
        free_items(item->items);
        free(item);
        item = next;
    }
}

void json_free(Json *tree) { free_items(tree); }

Json *json_parse(char *line) {
    Json *tree = allocate(sizeof *tree);
    *tree = (Json){0};
    char *end = read_value(skip_space(line), tree, 0);
    if (end == NULL || *skip_space(end) != '\0') {
        json_free(tree);
        return NULL;
    }
    return tree;
}

const Json *json_member(const Json *object, const char *key) {
    if (object == NULL || object->type != JSON_OBJECT) return NULL;
    for (const Json *item = object->items; item != NULL; item = item->next) {
        if (strcmp(item->key, key) == 0) return item;
    }
    return NULL;
}

long json_int(const Json *object, const char *key, long otherwise) {
    const Json *found = json_member(object, key);
    return found != NULL && found->type == JSON_NUMBER ? (long)found->number : otherwise;
}

bool json_bool(const Json *object, const char *key, bool otherwise) {
    const Json *found = json_member(object, key);
    return found != NULL && found->type == JSON_BOOL ? found->truth : otherwise;
}

const char *json_text(const Json *object, const char *key) {
    const Json *found = json_member(object, key);
    return found != NULL && found->type == JSON_STRING ? found->text : NULL;
}

const Json *json_array(const Json *object, const char *key) {
    const Json *found = json_member(object, key);
    return found != NULL && found->type == JSON_ARRAY ? found : NULL;
}

/* ---------------------------------------------------------------------------------------------- writing */

static void reserve(Buffer *buffer, size_t more) {
    if (buffer->length + more > buffer->capacity) {
        buffer->capacity = 2 * (buffer->length + more);
        buffer->bytes = reallocate(buffer->bytes, buffer->capacity);
    }
}

void put(Buffer *buffer, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    reserve(buffer, (size_t)length + 1);
    va_start(arguments, format);
    vsnprintf(buffer->bytes + buffer->length, (size_t)length + 1, format, arguments);
    va_end(arguments);
    buffer->length += (size_t)length;
}

void put_text(Buffer *buffer, const char *text) {
    put(buffer, "\"");
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\') {
            put(buffer, "\\%c", c);
        } else if (c < 0x20) {
            put(buffer, "\\u%04x", c);
        } else {
            put(buffer, "%c", c);
        }
    }
    put(buffer, "\"");
}

void put_ints(Buffer *buffer, const int *values, int count) {
    put(buffer, "[");
    for (int index = 0; index < count; index++) put(buffer, index ? ",%d" : "%d", values[index]);
    put(buffer, "]");
}
