"""Argosy's native core (`csrc/`): what must not wait for the interpreter.

Buffers are passed as addresses (`tensor.data_ptr()`) and element counts; the caller vouches that they are valid,
contiguous and stay alive during the call.
"""

def reduce(op: str, dtype: str, out: int, sources: list[int], count: int, isa: str | None = None) -> None:
    """Reduce the buffers at the addresses `sources`, element by element, into the one at `out`.

    Sources are combined in their order, 16-bit floats in f32 and rounded once (to nearest even) at the end, so the
    result has the same bits on every CPU; a NaN leaves as the canonical one. Integers wrap, and their average
    truncates toward zero. The GIL is released.

    Args:
        op: "sum", "avg", "min", "max" or "prod"; for integers also "band", "bor" or "bxor" (bitwise and, or, exclusive
            or). A NaN in any source makes the result NaN.
        dtype: "f32", "f64", "bf16", "f16", "i32", "i64", "i8", "u8" or "i16". The other types that the core knows
            ("boolean", "c64", "c128", "raw1", "raw2", "raw4", "raw8") can be moved, but not reduced.
        out: address of the result; may be one of `sources`, but not overlap one otherwise.
        sources: one or more addresses, of any alignment.
        count: elements in each buffer.
        isa: one of `instruction_sets()`, for tests; the default is the best of this CPU.

    Raises:
        ValueError: an argument is none of the above; the message says which, and what is allowed.
    """

def instruction_sets() -> list[str]:
    """The instruction sets that `reduce` can use on this CPU, best first. All give the same bits."""

def guard(fd: int) -> None:
    """Kill this process's whole group (SIGKILL) when the other end of `fd` is closed.

    `fd` is a pipe or stream socket whose other end belongs to the launcher. However the launcher dies, the kernel
    closes that end, so no worker outlives it. A native thread waits for it, whatever Python is doing; it reads nothing
    from `fd`, which can still carry messages, and it keeps working when `fd` is closed on this side.

    Call it from a process that leads a group of its own, and see that no other process holds the launcher's end.

    Raises:
        OSError: `fd` is not open.
        ValueError: `fd` is of a kind whose other end cannot be seen closing, such as a file or a datagram socket.
    """
