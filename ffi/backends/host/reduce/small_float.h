// Conversions between float32 and the 16- and 8-bit floating-point types, to
// nearest, ties to even. The 16-bit ones are branch-free so that loops over
// them vectorise.
//
// Included inside a namespace per instruction set: no include guard, no
// includes of its own. Needs <cmath>, <cstdint>, <cstring>.

inline float BitsToFloat(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t FloatToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

struct BFloat16 {
  uint16_t bits;
};

inline float Widen(BFloat16 x) {
  return BitsToFloat(static_cast<uint32_t>(x.bits) << 16);
}

inline void Narrow(float value, BFloat16* out) {
  const uint32_t bits = FloatToBits(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40;
  out->bits =
      static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded);
}

struct Float16 {
  uint16_t bits;
};

// Scaling by a power of two moves the exponent bias and makes subnormals come
// out right: Giesen, "Float->half variants", 2012 (public domain).
inline float Widen(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  const float scaled = BitsToFloat(magnitude) * BitsToFloat(0x77800000);  // 2^112
  const uint32_t special = magnitude | 0x7f800000;
  const uint32_t bits = magnitude >= (0x7c00u << 13) ? special : FloatToBits(scaled);
  return BitsToFloat(bits | sign);
}

inline void Narrow(float value, Float16* out) {
  const uint32_t bits = FloatToBits(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  // Subnormal: adding 0.5 lines the mantissa up and rounds in hardware.
  const uint32_t subnormal =
      FloatToBits(BitsToFloat(magnitude) + BitsToFloat(0x3f000000)) - 0x3f000000;
  const uint32_t normal = (magnitude + (static_cast<uint32_t>(15 - 127) << 23) + 0xfff +
                           ((magnitude >> 13) & 1)) >>
                          13;
  uint32_t result = magnitude < 0x38800000 ? subnormal : normal;
  result = magnitude >= 0x47800000 ? 0x7c00 : result;
  result = magnitude > 0x7f800000 ? 0x7e00 | ((magnitude >> 13) & 0x3ff) : result;
  out->bits = static_cast<uint16_t>(sign | result);
}

// How an 8-bit format spends its codes on infinity and NaN.
enum class Specials {
  kIeee,       // the largest exponent is infinity and NaN
  kNanOnly,    // all ones is NaN, no infinity ("fn")
  kNanIsZero,  // negative zero is NaN, no infinity, no -0 ("fnuz")
};

template <int kExponentBits, int kMantissaBits, int kBias, Specials kSpecials>
struct Float8 {
  uint8_t bits;
};

using Float8E5M2 = Float8<5, 2, 15, Specials::kIeee>;
using Float8E4M3 = Float8<4, 3, 7, Specials::kIeee>;
using Float8E3M4 = Float8<3, 4, 3, Specials::kIeee>;
using Float8E4M3FN = Float8<4, 3, 7, Specials::kNanOnly>;
using Float8E4M3B11FNUZ = Float8<4, 3, 11, Specials::kNanIsZero>;
using Float8E4M3FNUZ = Float8<4, 3, 8, Specials::kNanIsZero>;
using Float8E5M2FNUZ = Float8<5, 2, 16, Specials::kNanIsZero>;

template <int E, int M, int B, Specials S>
float Widen(Float8<E, M, B, S> x) {
  const int sign = x.bits >> 7;
  const int exponent = (x.bits >> M) & ((1 << E) - 1);
  const int mantissa = x.bits & ((1 << M) - 1);
  const float nan = BitsToFloat(0x7fc00000);
  if (S == Specials::kNanIsZero && x.bits == 0x80) return nan;
  if (S == Specials::kNanOnly && (x.bits & 0x7f) == 0x7f) return nan;
  if (S == Specials::kIeee && exponent == (1 << E) - 1) {
    if (mantissa != 0) return nan;
    return BitsToFloat(sign ? 0xff800000 : 0x7f800000);
  }
  const float magnitude =
      exponent == 0
          ? std::ldexp(static_cast<float>(mantissa), 1 - B - M)
          : std::ldexp(static_cast<float>(mantissa + (1 << M)), exponent - B - M);
  return sign ? -magnitude : magnitude;
}

template <int E, int M, int B, Specials S>
void Narrow(float value, Float8<E, M, B, S>* out) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const uint8_t infinity = ((1 << E) - 1) << M;
  const uint8_t nan = S == Specials::kNanIsZero ? 0x80
                      : S == Specials::kNanOnly ? (sign | 0x7f)
                                                : (sign | infinity | (1 << (M - 1)));
  // The code after the largest finite one.
  const int overflow = S == Specials::kIeee      ? infinity
                       : S == Specials::kNanOnly ? 0x7f
                                                 : 0x80;
  if (std::isnan(value)) {
    out->bits = nan;
    return;
  }
  int exponent = 0;
  const float magnitude = std::fabs(value);
  std::frexp(magnitude, &exponent);  // magnitude in [2^(exponent-1), 2^exponent)
  int code = overflow;
  if (!std::isinf(magnitude)) {
    // 1 is also the subnormals' and zero's, which frexp gives no exponent.
    const int field = magnitude == 0 ? 1 : std::max(exponent - 1 + B, 1);
    // In units of the last place of that exponent; nearbyint rounds to even.
    const float units = std::nearbyint(std::ldexp(magnitude, B + M - field));
    // A carry out of the mantissa adds one to the exponent by itself.
    if (units < (1 << (M + 2))) {
      code = static_cast<int>(units) + ((field - 1) << M);
    }
  }
  if (code >= overflow) {
    out->bits = S == Specials::kIeee ? (sign | infinity) : nan;
    return;
  }
  out->bits = static_cast<uint8_t>(code);
  if (S != Specials::kNanIsZero || code != 0) out->bits |= sign;
}

// An exponent alone: 2^(bits - 127), 255 is NaN; no sign, no zero.
struct Float8E8M0FNU {
  uint8_t bits;
};

inline float Widen(Float8E8M0FNU x) {
  return x.bits == 255 ? BitsToFloat(0x7fc00000)
                       : std::ldexp(1.0f, static_cast<int>(x.bits) - 127);
}

inline void Narrow(float value, Float8E8M0FNU* out) {
  if (!(value > 0) || std::isinf(value)) {
    out->bits = 255;
    return;
  }
  int exponent = 0;
  const float mantissa = std::frexp(value, &exponent);  // in [0.5, 1)
  int field = exponent - 1 + 127;
  // Halfway between 2^e and 2^(e+1) goes up, as in ml_dtypes.
  if (mantissa >= 0.75f) ++field;
  out->bits = static_cast<uint8_t>(field < 0 ? 0 : field > 254 ? 255 : field);
}

// The largest finite value, or the lowest, of a type without infinity.
template <int E, int M, int B, Specials S>
Float8<E, M, B, S> Extreme(Float8<E, M, B, S>, bool lowest) {
  const uint8_t largest = S == Specials::kNanOnly ? 0x7e : 0x7f;
  return {static_cast<uint8_t>(lowest ? largest | 0x80 : largest)};
}

inline Float8E8M0FNU Extreme(Float8E8M0FNU, bool lowest) {
  return {static_cast<uint8_t>(lowest ? 0 : 254)};
}
