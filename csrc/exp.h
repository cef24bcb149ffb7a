// 2^x, silu, gelu, tanh and softplus on sixteen lanes, for softmax, the gated layer, soft caps and the gates of recurrences.
#pragma once

namespace wager::WAGER_NS {

// 2^x to about 1e-7 relative; 2^0 is exactly 1; zero below 2^-126; NaN stays NaN. Taylor series on [-1/2, 1/2].
WAGER_INLINE F exp2(F x) {
    const F bias = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    x = min(splat(127.0f), max(splat(-127.0f), x));
    const F biased = add(x, bias);
    const F f = sub(x, sub(biased, bias));
    F p = splat(1.5252734e-5f);
    p = fma(p, f, splat(1.5403530e-4f));
    p = fma(p, f, splat(1.3333558e-3f));
    p = fma(p, f, splat(9.6181291e-3f));
    p = fma(p, f, splat(5.5504109e-2f));
    p = fma(p, f, splat(2.4022651e-1f));
    p = fma(p, f, splat(6.9314718e-1f));
    p = fma(p, f, splat(1.0f));
    return times_power(p, biased);
}

// 2^x to 3e-6 relative, for x <= 127: a probability is rounded to bf16 (2e-3), and enters a sum of such. Zero below 2^-126;
// NaN stays NaN. Minimax polynomial of degree 4 on [-1/2, 1/2]. Of several values at once, step by step for all: one after
// the other, the operations of the first few would wait for each other and fill the processor's window.
template <int N>
WAGER_INLINE void exp2_short(F (&x)[N]) {
    constexpr float kPolynomial[] = {9.5701e-3f, 5.591786e-2f, 2.4024745e-1f, 6.9312181e-1f, 9.9999926e-1f};
    const F bias = splat(12582912.0f);
    F biased[N], p[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) x[i] = max(splat(-127.0f), x[i]);
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) biased[i] = add(x[i], bias);
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) x[i] = sub(x[i], sub(biased[i], bias)), p[i] = splat(kPolynomial[0]);
#pragma GCC unroll 4
    for (int term = 1; term < 5; ++term)
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) p[i] = fma(p[i], x[i], splat(kPolynomial[term]));
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) x[i] = times_power(p[i], biased[i]);
}

constexpr float kLog2e = 1.44269504f;

// x / (1 + exp(-x))
WAGER_INLINE F silu(F x) { return div(x, add(splat(1.0f), exp2(mul(x, splat(-kLog2e))))); }

// x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) * (x + 0.044715 x^3), which is x / (1 + exp(-2 u)).
WAGER_INLINE F gelu(F x) {
    const F cubic = fma(mul(x, x), splat(0.044715f * 0.7978845608f), splat(0.7978845608f));
    return div(x, add(splat(1.0f), exp2(mul(mul(x, cubic), splat(-2.0f * kLog2e)))));
}

// The gated layer of gpt-oss: gate at most 7, up within 7 of zero; gate * sigmoid(1.702 gate) * (up + 1). Of two operands the
// second is taken where one is NaN.
WAGER_INLINE F clamped(F gate, F up) {
    constexpr float kLimit = 7.0f, kAlpha = 1.702f;
    gate = min(splat(kLimit), gate);
    up = max(splat(-kLimit), min(splat(kLimit), up));
    const F part = div(gate, add(splat(1.0f), exp2(mul(gate, splat(-kLog2e * kAlpha)))));
    return mul(part, add(up, splat(1.0f)));
}
WAGER_INLINE F gated(Activation kind, F gate, F up) {
    if (kind == Activation::clamped) return clamped(gate, up);
    return mul(kind == Activation::gelu ? gelu(gate) : silu(gate), up);
}

WAGER_INLINE F sigmoid(F x) { return div(splat(1.0f), add(splat(1.0f), exp2(mul(x, splat(-kLog2e))))); }

// log(1 + exp(x)) to about 2e-7 relative: max(x, 0) + log(1 + y), y = exp(-|x|) at most 1, and log(1 + y) = 2 artanh(y / (2 + y)) by
// its Taylor series, where what artanh is of is at most 1/3.
WAGER_INLINE F softplus(F x) {
    const F y = exp2(mul(magnitude(x), splat(-kLog2e))), z = div(y, add(splat(2.0f), y)), square = mul(z, z);
    F p = splat(2.0f / 15);
    p = fma(p, square, splat(2.0f / 13));
    p = fma(p, square, splat(2.0f / 11));
    p = fma(p, square, splat(2.0f / 9));
    p = fma(p, square, splat(2.0f / 7));
    p = fma(p, square, splat(2.0f / 5));
    p = fma(p, square, splat(2.0f / 3));
    p = fma(p, square, splat(2.0f));
    return fma(p, z, max(zero(), x));
}

// cap * tanh(x * scale / cap), by tanh(z) = 1 - 2 / (exp(2 z) + 1); to about 1e-7 of cap.
WAGER_INLINE F soft_capped(F x, float scale, float cap) {
    const F power = exp2(mul(x, splat(2.0f * kLog2e * scale / cap)));
    return sub(splat(cap), div(splat(2.0f * cap), add(power, splat(1.0f))));
}

}  // namespace wager::WAGER_NS
