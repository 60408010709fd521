// Numbers of a tensor, which are floats, or bfloat16 if BFLOAT16 is defined; arithmetic is in float.
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef BFLOAT16
typedef uint16_t number;
static inline float get(number bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}
static inline number put(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    number half = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return value == value ? half : 0x7fc0;
}
// get(put(value)), in a form that compilers vectorise.
static inline float rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    memcpy(&value, &bits, 4);
    return value;
}
#else
typedef float number;
static inline float get(number value) { return value; }
static inline number put(float value) { return value; }
static inline float rounded(float value) { return value; }
#endif

// e**x within 2 ulp, 0 below the smallest normal number; NaN stays NaN. A polynomial, so that loops vectorise.
static inline float exp_(float x) {
    float y = x > 88.0f ? 88.0f : x;
    float n = floorf(y * 1.44269504088896341f + 0.5f);
    float r = y - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    float least = n < -126.0f ? -126.0f : n;
    union { int32_t bits; float scale; } power = {((int32_t)least + 127) << 23};
    return x < -87.0f ? 0.0f : p * power.scale;
}
