// The optimizers' formulas, as torch.optim has them, on rows. Written once, built for each instruction set.
//
// Each is a plain loop over a row's columns, which the compiler turns into vectors (with -fno-math-errno, square roots
// too). Sums over a row are taken in a fixed order of eight lanes, so that all builds give the same bits.
#pragma once

#include "row_kernels.h"

namespace argosy::ARGOSY_ISA {
namespace {

ARGOSY_INLINE float root(float x) { return __builtin_sqrtf(x); }

// The numbers that one element's update needs besides its own.
struct Step {
  float scale, lr, step_size, root_correction;
};

// Updates one row. `w` is the value and `s` the state behind it; weight decay is torch's: it adds to the gradient,
// except in AdamW.
template <RuleKind kKind, class Width>
ARGOSY_INLINE void update_row(const Rule& rule, const Step& step, float* __restrict w, float* __restrict s,
                              const float* __restrict gradient, Width dim) {
  const float lr = step.lr, scale = step.scale, decay = rule.weight_decay, eps = rule.eps;
  const auto g_at = [=](std::size_t i) { return gradient[i] * scale + decay * w[i]; };
  if constexpr (kKind == RuleKind::add) {
    for (std::size_t i = 0; i < dim; ++i) w[i] += gradient[i] * scale;
  } else if constexpr (kKind == RuleKind::sgd) {
    for (std::size_t i = 0; i < dim; ++i) w[i] -= lr * g_at(i);
  } else if constexpr (kKind == RuleKind::momentum) {
    const float momentum = rule.momentum, look = rule.nesterov ? 1.0f : 0.0f;
    for (std::size_t i = 0; i < dim; ++i) {
      const float g = g_at(i), velocity = momentum * s[i] + g;
      s[i] = velocity;
      w[i] -= lr * (look != 0 ? g + momentum * velocity : velocity);
    }
  } else if constexpr (kKind == RuleKind::adagrad) {
    for (std::size_t i = 0; i < dim; ++i) {
      const float g = g_at(i), sum = s[i] + g * g;
      s[i] = sum;
      w[i] -= lr * g / (root(sum) + eps);
    }
  } else if constexpr (kKind == RuleKind::adagrad_row) {  // one sum for the row, of the mean of the squares
    float lanes[8] = {};
    std::size_t i = 0;
    for (; i + 8 <= dim; i += 8) {
      for (std::size_t lane = 0; lane < 8; ++lane) lanes[lane] += g_at(i + lane) * g_at(i + lane);
    }
    for (std::size_t lane = 0; i < dim; ++i, ++lane) lanes[lane] += g_at(i) * g_at(i);
    float sum = 0;
    for (const float lane : lanes) sum += lane;
    s[0] += sum / static_cast<float>(std::size_t{dim});
    const float divisor = root(s[0]) + eps;
    for (i = 0; i < dim; ++i) w[i] -= lr * g_at(i) / divisor;
  } else if constexpr (kKind == RuleKind::rmsprop) {
    const float alpha = rule.alpha, rest = 1 - rule.alpha;
    for (std::size_t i = 0; i < dim; ++i) {
      const float g = g_at(i), mean = alpha * s[i] + rest * g * g;
      s[i] = mean;
      w[i] -= lr * g / (root(mean) + eps);
    }
  } else if constexpr (kKind == RuleKind::adam || kKind == RuleKind::adamw) {
    const float rest1 = 1 - rule.beta1, beta2 = rule.beta2, rest2 = 1 - rule.beta2;
    const float keep = kKind == RuleKind::adamw ? 1 - lr * decay : 1.0f;
    float* __restrict second = s + dim;
    for (std::size_t i = 0; i < dim; ++i) {
      const float g = kKind == RuleKind::adamw ? gradient[i] * scale : g_at(i);
      const float mean = s[i] + rest1 * (g - s[i]), square = beta2 * second[i] + rest2 * g * g;
      s[i] = mean;
      second[i] = square;
      w[i] = keep * w[i] - step.step_size * mean / (root(square) / step.root_correction + eps);
    }
  } else {
    static_assert(kKind == RuleKind::ftrl);
  }
}

// FTRL-proximal (McMahan et al. 2013): state z, then n. n^0.5 is generalised to n^-lr_power.
template <class Width>
ARGOSY_INLINE void update_ftrl(const Rule& rule, const Step& step, float* __restrict w, float* __restrict z,
                               const float* __restrict gradient, Width dim) {
  const float per_lr = 1 / step.lr, beta = rule.beta1, l1 = rule.l1, l2 = rule.l2, power = -rule.lr_power;
  float* __restrict n = z + dim;
  const auto run = [&](auto raised) {
    for (std::size_t i = 0; i < dim; ++i) {
      const float g = gradient[i] * step.scale + rule.weight_decay * w[i], sum = n[i] + g * g;
      const float after = raised(sum), sigma = (after - raised(n[i])) * per_lr;
      const float linear = z[i] + g - sigma * w[i];
      const float beyond = linear > 0 ? linear - l1 : linear + l1;
      z[i] = linear;
      n[i] = sum;
      const float moved = -beyond / ((beta + after) * per_lr + l2);
      w[i] = __builtin_fabsf(linear) <= l1 ? 0.0f : moved;
    }
  };
  if (power == 0.5f) {
    run([](float x) { return root(x); });
  } else {
    run([power](float x) { return __builtin_powf(x, power); });
  }
}

template <RuleKind kKind>
void update(const Rule& given, const RowBatch& batch) {
  const Rule rule = given;  // a copy that no store can change
  with_dim(batch.dim, [&](auto dim) {
    Step step{batch.scale, batch.lr, 0, 1};
    for (std::size_t row = 0; row < batch.rows; ++row) {
      if constexpr (kKind == RuleKind::adam || kKind == RuleKind::adamw) {
        step.step_size = batch.step_sizes[row];
        step.root_correction = batch.root_corrections[row];
      }
      float* value = batch.values[row];
      if constexpr (kKind == RuleKind::ftrl) {
        if (step.lr == 0) return;  // its formula divides by the rate
        update_ftrl(rule, step, value, value + dim, batch.gradients[row], dim);
      } else {
        update_row<kKind>(rule, step, value, value + dim, batch.gradients[row], dim);
      }
    }
  });
}

std::uint64_t not_finite(const float* const* gradients, std::size_t rows, std::size_t dim, float scale) {
  return with_dim(dim, [=](auto width) {
    std::uint64_t found = 0;
    for (std::size_t row = 0; row < rows; ++row) {
      std::uint32_t largest = 0;  // as whole numbers, infinity and NaN are larger than all else
#pragma GCC unroll 1              // a loop becomes vectors; unrolled, this would be done number by number
      for (std::size_t i = 0; i < width; ++i) {
        const float scaled = gradients[row][i] * scale;
        std::uint32_t bits;
        __builtin_memcpy(&bits, &scaled, sizeof bits);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
      }
      found |= std::uint64_t{largest >= 0x7f800000u} << row;
    }
    return found;
  });
}

void compensate(const float* gradient, const float* value, const float* pulled, std::size_t dim, float scale,
                float compensation, float* __restrict out) {
  for (std::size_t i = 0; i < dim; ++i) {
    const float g = gradient[i] * scale;
    float part = compensation * g * (value[i] - pulled[i]);
    part = part > 1 ? 1 : part;
    part = part < -1 ? -1 : part;
    out[i] = g + part * g;
  }
}

}  // namespace

const RowKernels row_kernels = {{update<RuleKind::sgd>, update<RuleKind::momentum>, update<RuleKind::adagrad>,
                                 update<RuleKind::adagrad_row>, update<RuleKind::rmsprop>, update<RuleKind::adam>,
                                 update<RuleKind::adamw>, update<RuleKind::ftrl>, update<RuleKind::add>},
                                not_finite,
                                compensate,
                                initialise,
                                expand,
                                add_up,
                                largest,
                                expand_bags,
                                add_up_bags};

}  // namespace argosy::ARGOSY_ISA
