#include <math.h>
#include <stdint.h>

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
