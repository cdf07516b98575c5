// exp, tanh and the activations, over any instruction set S (simd_portable.h).
#pragma once

#include "simd_portable.h"

#if !defined(ENGINEWRIGHT_MATH)
#define ENGINEWRIGHT_MATH ENGINEWRIGHT_INLINE
#endif

namespace enginewright {
namespace {

// e^x, within 2 ulp; 0 below -104, infinity above 88.8, NaN stays NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its minimax polynomial of degree 6 (coefficients: Cephes expf).
template <class S>
ENGINEWRIGHT_MATH typename S::F exp(typename S::F x) {
  x = S::min(S::set1(89.0f), S::max(S::set1(-104.0f), x));
  const auto n = S::round(S::mul(x, S::set1(1.44269504088896341f)));
  auto r = S::fma(n, S::set1(-0.693359375f), x);
  r = S::fma(n, S::set1(2.12194440e-4f), r);
  auto p = S::set1(1.9875691500e-4f);
  p = S::fma(p, r, S::set1(1.3981999507e-3f));
  p = S::fma(p, r, S::set1(8.3334519073e-3f));
  p = S::fma(p, r, S::set1(4.1665795894e-2f));
  p = S::fma(p, r, S::set1(1.6666665459e-1f));
  p = S::fma(p, r, S::set1(5.0000001201e-1f));
  p = S::fma(p, S::mul(r, r), S::add(r, S::set1(1.0f)));
  return S::scale_pow2(p, n);
}

// tanh x. Below 0.625 the odd polynomial of Cephes tanhf, above 1 - 2 / (e^2|x| + 1).
template <class S>
ENGINEWRIGHT_MATH typename S::F tanh(typename S::F x) {
  const auto z = S::abs(x), one = S::set1(1.0f), s = S::mul(x, x);
  const auto large = S::sub(one, S::div(S::set1(2.0f), S::add(exp<S>(S::add(z, z)), one)));
  auto p = S::set1(-5.70498872745e-3f);
  p = S::fma(p, s, S::set1(2.06390887954e-2f));
  p = S::fma(p, s, S::set1(-5.37397155531e-2f));
  p = S::fma(p, s, S::set1(1.33314422036e-1f));
  p = S::fma(p, s, S::set1(-3.33332819422e-1f));
  const auto small = S::fma(S::mul(p, s), x, x);
  const auto signed_large = S::where_less(x, S::zero(), S::sub(S::zero(), large), large);
  return S::where_less(z, S::set1(0.625f), small, signed_large);
}

// x / (1 + e^-x)
template <class S>
ENGINEWRIGHT_MATH typename S::F silu(typename S::F x) {
  return S::div(x, S::add(S::set1(1.0f), exp<S>(S::sub(S::zero(), x))));
}

// x (1 + tanh u) / 2 = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
template <class S>
ENGINEWRIGHT_MATH typename S::F gelu_tanh(typename S::F x) {
  const auto cube = S::mul(S::mul(x, x), x);
  const auto u = S::mul(S::fma(S::set1(0.044715f), cube, x), S::set1(-1.5957691216057308f));
  return S::div(x, S::add(S::set1(1.0f), exp<S>(u)));
}

// 1 / (1 + e^-x)
template <class S>
ENGINEWRIGHT_MATH typename S::F sigmoid(typename S::F x) {
  return S::div(S::set1(1.0f), S::add(S::set1(1.0f), exp<S>(S::sub(S::zero(), x))));
}

// x (1 + erf(x / sqrt 2)) / 2. The smaller one of erfc(±x / sqrt 2) is t e^(-z² + p(t)), t = 1 / (1 + z / 2),
// with a relative error of 1.2e-7 (Press et al., Numerical Recipes, erfcc).
template <class S>
ENGINEWRIGHT_MATH typename S::F gelu(typename S::F x) {
  const auto one = S::set1(1.0f), z = S::mul(S::abs(x), S::set1(0.70710678118654752f));
  const auto t = S::div(one, S::fma(S::set1(0.5f), z, one));
  auto p = S::set1(0.17087277f);
  p = S::fma(p, t, S::set1(-0.82215223f));
  p = S::fma(p, t, S::set1(1.48851587f));
  p = S::fma(p, t, S::set1(-1.13520398f));
  p = S::fma(p, t, S::set1(0.27886807f));
  p = S::fma(p, t, S::set1(-0.18628806f));
  p = S::fma(p, t, S::set1(0.09678418f));
  p = S::fma(p, t, S::set1(0.37409196f));
  p = S::fma(p, t, S::set1(1.00002368f));
  p = S::fma(p, t, S::set1(-1.26551223f));
  const auto tail =
      S::mul(S::mul(S::set1(0.5f), t), exp<S>(S::fma(S::sub(S::zero(), z), z, p)));  // 1 - Φ(|x|)
  return S::mul(x, S::where_less(x, S::zero(), tail, S::sub(one, tail)));
}

// max(x, 0)²
template <class S>
ENGINEWRIGHT_MATH typename S::F relu2(typename S::F x) {
  const auto above = S::max(S::zero(), x);  // NaN stays NaN
  return S::mul(above, above);
}

}  // namespace
}  // namespace enginewright
