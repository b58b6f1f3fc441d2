// Element-wise reduction of several buffers into one: out[i] = op(source_0[i], source_1[i], ...).
//
// The arithmetic is in reduce_kernels.h, built once per instruction set; here one of the builds is chosen at run
// time, so that one binary serves every CPU of its architecture.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "reduce_types.h"

namespace argosy {

// Throw std::invalid_argument, saying what is allowed, for a name that is not one.
Op parse_op(std::string_view name);
DType parse_dtype(std::string_view name);

// For messages: any number may be asked for.
std::string_view op_name(std::size_t op);
std::string_view dtype_name(std::size_t dtype);

std::size_t element_bytes(DType dtype);

// The names of those that this CPU can run, best first.
std::vector<std::string_view> instruction_sets();

// The kernel of the best instruction set, or of the named one. Throws std::invalid_argument if this CPU lacks it, or if
// the type cannot be reduced, or not by that operation.
ReduceKernel find_reduce_kernel(Op op, DType dtype, std::optional<std::string_view> isa = {});

// Throws std::invalid_argument if these are not what a kernel may be called with.
void check_reduce_buffers(DType dtype, const std::byte* out, std::span<const std::byte* const> sources,
                          std::size_t count);

}  // namespace argosy
