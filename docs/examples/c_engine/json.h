/* As much JSON as the wire needs: a line is parsed into a tree, an answer is written into a buffer. */
#ifndef JSON_H
#define JSON_H

#include <stdbool.h>
#include <stddef.h>

typedef enum { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } JsonType;

typedef struct Json Json;
struct Json {
    JsonType type;
    const char *key;  /* of a member of an object */
    const char *text; /* of a string */
    double number;
    bool truth;
    size_t count; /* of the items of an array or object */
    Json *items;  /* the first of them */
    Json *next;   /* the next in the same array or object */
};

/* Parses `line`, which is changed and must outlive the tree. NULL when it is not JSON. json_free frees the tree. */
Json *json_parse(char *line);
void json_free(Json *tree);

/* The member `key` of an object, NULL without one. */
const Json *json_member(const Json *object, const char *key);
/* The same, as what it is expected to be; `otherwise` when it is absent or of another type. */
long json_int(const Json *object, const char *key, long otherwise);
bool json_bool(const Json *object, const char *key, bool otherwise);
const char *json_text(const Json *object, const char *key);
const Json *json_array(const Json *object, const char *key);

typedef struct {
    char *bytes;
    size_t length, capacity;
} Buffer;

/* Appends text as it is, as printf does. */
void put(Buffer *buffer, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Appends a JSON string. */
void put_text(Buffer *buffer, const char *text);
/* Appends a JSON array of integers. */
void put_ints(Buffer *buffer, const int *values, int count);

/* malloc and realloc that end the process when there is no memory. */
void *allocate(size_t bytes);
void *reallocate(void *old, size_t bytes);

#endif
