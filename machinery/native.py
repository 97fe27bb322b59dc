"""Formulas on vectors, compiled by the system's C compiler where there is one.

A formula is what `lanes` makes of a function: numbers that follow from other numbers by scalar
operations, each number a vector over the episodes. XLA makes hundreds of kernels of the thousands of
operations of a physics step; every kernel computes again what others have computed, reads from memory
and writes back. Written as one C function on vectors as wide as the machine's, with the sub-steps as a
loop inside, every number is computed once and stays in the first-level cache. What it gains is in
`docs/journal.md`.

The compiler is `cc`, or what the environment variable CC says; it runs once, and the result is kept in
the cache directory. `compiled` returns nothing where there is none, or for an operation not in its list.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from machinery import files

Number = Any  # a `Vector`, or a NumPy scalar: the same for all episodes


@dataclass(frozen=True, eq=False)
class Vector:
    """One number of every episode: given, or an operation on other numbers."""

    dtype: np.dtype
    operation: str = "given"
    operands: tuple[Number, ...] = ()
    params: dict[str, Any] = field(default_factory=dict)
    primitive: Any = None  # of JAX, for this operation


@dataclass(frozen=True, eq=False)
class Loop:
    """Repeats: `inside` stands for what is carried, `after` for what becomes of it in one pass.

    What comes out are vectors with the operation "loop" on `start` and this object as a parameter.
    """

    length: int
    start: list[Number]
    inside: list[Vector]
    after: list[Number]
    outside: list[Vector] = field(default_factory=list)


def is_known(number: Number) -> bool:
    return not isinstance(number, Vector)


def needed(results: Iterable[Number], done: Container[Vector]) -> Iterator[Vector]:
    """What the results need that is not done, operands first and each as late as possible.

    Whoever iterates adds each vector to `done`. In this order few numbers are alive at a time.
    """
    stack = [*results][::-1]
    while stack:
        last = stack[-1]
        if is_known(last) or last in done:
            stack.pop()
            continue
        missing = [x for x in last.operands if not is_known(x) and x not in done]
        if not missing:
            yield last
        stack.extend(reversed(missing))


def operations(results: Iterable[Number]) -> int:
    """How many scalar operations an episode's results take."""
    done, total = set(), 0
    for vector in needed(results, done):
        if vector.operation == "loop":
            loop: Loop = vector.params["loop"]
            total += loop.length * operations(loop.after)
            done.update(loop.outside)
        else:
            total += vector.operation != "given"
            done.add(vector)
    return total


# --- C ------------------------------------------------------------------------------------------------

FLAGS = ["-O2", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
INFIX = {
    "mul": "*", "add": "+", "sub": "-", "div": "/", "lt": "<", "gt": ">", "le": "<=", "ge": ">=",
    "eq": "==", "ne": "!=", "and": "&", "or": "|", "xor": "^",
}  # fmt: skip
PREFIX = {"neg": "-", "not": "~"}  # of a truth value, which is 0 or -1, all bits
FUNCTIONS = {"max", "min", "abs", "sign", "atan2", "clamp", "square", "select_n"}  # see HEAD
# What an operation may be applied to: f float, i int, b truth. All others: floats.
ANY, TRUTH = ("ff", "ii", "bb"), ("b", "bb")
OPERANDS = {
    "mul": ("ff", "ii"), "add": ("ff", "ii"), "sub": ("ff", "ii"), "neg": ("f", "i"),
    "lt": ANY, "gt": ANY, "le": ANY, "ge": ANY, "eq": ANY, "ne": ANY,
    "and": TRUTH, "or": TRUTH, "xor": TRUTH, "not": TRUTH, "select_n": ("bff",),
}  # fmt: skip
EACH = {  # one lane after the other, by the C library; `sqrt` becomes one instruction
    "sqrt", "exp", "exp2", "expm1", "log", "log1p", "sin", "cos", "tan", "asin", "acos", "atan",
    "sinh", "cosh", "tanh", "cbrt", "erf", "floor", "ceil",
}  # fmt: skip
HEAD = """
#include <math.h>
#include <stdint.h>
#include "xla/ffi/api/c_api.h"
#if defined(__AVX512F__)
enum { W = 16 };
#elif defined(__AVX__)
enum { W = 8 };
#else
enum { W = 4 };
#endif
typedef float f __attribute__((vector_size(4 * W), aligned(4)));
typedef int32_t i __attribute__((vector_size(4 * W), aligned(4)));  // also truth: 0 or -1

static inline f pick(i c, f yes, f no) { return (f)((c & (i)yes) | (~c & (i)no)); }
static inline f select_n_of(i c, f no, f yes) { return pick(c, yes, no); }
static inline f square_of(f x) { return x * x; }
static inline f abs_of(f x) { return (f)((i)x & INT32_MAX); }
static inline f max_of(f a, f b) { return pick((a > b) | (a != a), a, b); }
static inline f min_of(f a, f b) { return pick((a < b) | (a != a), a, b); }
static inline f clamp_of(f low, f x, f high) { return min_of(max_of(x, low), high); }
static inline f sign_of(f x) { return pick(x > 0, (f){} + 1, pick(x < 0, (f){} - 1, x)); }
static inline f atan2_of(f y, f x) {
  f a = abs_of(x), b = abs_of(y);
  i steep = b > a;
  f low = pick(steep, a, b), high = pick(steep, b, a);  // the angle is in [0, 45] degrees, ...
  i upper = low > 0.41421356f * high;                   // ... or in [-22.5, 22.5] around 45
  f t = pick(upper, low - high, low) / pick(upper, low + high, high);
  t = pick((low == 0) & (high == 0), low, t);
  f s = t * t, p = 8.05374449538e-2f * s - 1.38776856032e-1f;
  p = (p * s + 1.99777106478e-1f) * s - 3.33329491539e-1f;  // Cephes, single precision
  f angle = pick(upper, (f){} + (float)M_PI_4, (f){}) + (p * s * t + t);
  angle = pick(steep, (float)M_PI_2 - angle, angle);
  angle = pick((i)x < 0, (float)M_PI - angle, angle);
  return (f)((i)angle | ((i)y & INT32_MIN));
}
#define EACH(name) \\
  static inline f name##_of(f x) { \\
    for (int k = 0; k < W; k++) x[k] = name##f(x[k]); \\
    return x; \\
  }
static inline f load_f(const void *p, int many) {
  if (many == W) return *(const f *)p;
  f x;
  for (int k = 0; k < W; k++) x[k] = ((const float *)p)[k < many ? k : 0];
  return x;
}
static inline i load_i(const void *p, int many) { return (i)load_f(p, many); }
static inline i load_b(const void *p, int many) {
  i x;
  for (int k = 0; k < W; k++) x[k] = -((const int8_t *)p)[k < many ? k : 0];
  return x;
}
static inline void store_f(void *p, int many, f x) {
  if (many == W) *(f *)p = x;
  else for (int k = 0; k < many; k++) ((float *)p)[k] = x[k];
}
static inline void store_i(void *p, int many, i x) { store_f(p, many, (f)x); }
static inline void store_b(void *p, int many, i x) {
  for (int k = 0; k < many; k++) ((int8_t *)p)[k] = -x[k];
}
static int introduced(XLA_FFI_CallFrame *frame) {  // XLA only asks who we are
  XLA_FFI_Extension_Base *extension = frame->extension_start;
  if (!extension || extension->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Api_Version *version = &((XLA_FFI_Metadata_Extension *)extension)->metadata->api_version;
  version->major_version = XLA_FFI_API_MAJOR;
  version->minor_version = XLA_FFI_API_MINOR;
  return 1;
}
"""
TAIL = """
XLA_FFI_Error *run(XLA_FFI_CallFrame *frame) {
  if (introduced(frame)) return 0;
  char *in[INPUTS], *out[OUTPUTS];
  for (int k = 0; k < INPUTS; k++) in[k] = ((XLA_FFI_Buffer *)frame->args.args[k])->data;
  for (int k = 0; k < OUTPUTS; k++) out[k] = ((XLA_FFI_Buffer *)frame->rets.rets[k])->data;
  int64_t n = ((XLA_FFI_Buffer *)frame->args.args[0])->dims[0];
  for (int64_t e = 0; e < n; e += W) block(in, out, n, e, n - e < W ? n - e : W);
  return 0;
}
"""


class _Untranslatable(Exception):
    pass


def _type(dtype: Any) -> str:
    kinds = {np.dtype(np.float32): "f", np.dtype(np.int32): "i", np.dtype(bool): "b"}
    if np.dtype(dtype) not in kinds:
        raise _Untranslatable(f"numbers of type {dtype}")
    return kinds[np.dtype(dtype)]


def _declare(dtype: Any) -> str:
    return "f" if _type(dtype) == "f" else "i"


def _constant(number: Any) -> str:
    """A vector in which every lane is this number."""
    kind = _type(number.dtype)
    if kind != "f":
        return f"((i){{}} + {-int(number) if kind == 'b' else int(number)})"
    if np.isnan(number):
        return "((f){} + NAN)"
    text = f"{'-' if number < 0 else ''}INFINITY" if np.isinf(number) else f"{float(number).hex()}f"
    return f"((f){{}} + {text})"


class _Writer:
    """Writes formulas as lines of C."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0

    def variable(self, dtype: Any, value: str) -> str:
        self.count += 1
        self.lines.append(f"{_declare(dtype)} v{self.count} = {value};")
        return f"v{self.count}"

    def write(self, results: Iterable[Number], names: dict[Vector, str]) -> list[str]:
        """The results as C expressions; what they need is written, and its names are added."""
        results = list(results)
        for vector in needed(results, names):
            if vector.operation == "loop":
                loop: Loop = vector.params["loop"]
                names |= zip(loop.outside, self.loop(loop, names), strict=True)
            else:
                operands = [_constant(x) if is_known(x) else names[x] for x in vector.operands]
                names[vector] = self.variable(vector.dtype, _expression(vector, operands))
        return [_constant(x) if is_known(x) else names[x] for x in results]

    def loop(self, loop: Loop, names: dict[Vector, str]) -> list[str]:
        start = self.write(loop.start, names)
        carried = [self.variable(v.dtype, x) for v, x in zip(loop.inside, start, strict=True)]
        self.lines.append(f"for (int k = 0; k < {loop.length}; k++) {{")
        after = self.write(loop.after, names | dict(zip(loop.inside, carried, strict=True)))
        # All are read before any is overwritten: a new one may be an old one elsewhere.
        after = [self.variable(v.dtype, x) for v, x in zip(loop.inside, after, strict=True)]
        self.lines += [f"{old} = {new};" for old, new in zip(carried, after, strict=True)]
        self.lines.append("}")
        return carried


def _expression(vector: Vector, operands: list[str]) -> str:
    name, kinds = vector.operation, "".join(_type(x.dtype) for x in vector.operands)
    if name == "convert_element_type":
        return _conversion(kinds, _type(vector.dtype), operands[0])
    if name == "select_n" and kinds in ("bii", "bbb"):
        return f"(i)select_n_of({operands[0]}, (f){operands[1]}, (f){operands[2]})"
    if name == "integer_pow" and vector.params["y"] > 0:
        return " * ".join(operands * vector.params["y"])
    if kinds not in OPERANDS.get(name, ("f", "ff", "fff")):
        raise _Untranslatable(f"{name} of {kinds}")
    if name in INFIX:
        return f"{operands[0]} {INFIX[name]} {operands[1]}"
    if name in PREFIX:
        return f"{PREFIX[name]}{operands[0]}"
    if name in FUNCTIONS or name in EACH:
        return f"{name}_of({', '.join(operands)})"
    raise _Untranslatable(name)


def _conversion(old: str, new: str, operand: str) -> str:
    if old == new:
        return operand
    if new == "b":
        return f"{operand} != 0"
    if old == "b":
        return f"{operand} & 1" if new == "i" else f"(f)({operand} & (i)((f){{}} + 1))"
    return f"__builtin_convertvector({operand}, {new})"


def _source(inputs: list[list[Vector]], results: list[tuple[list[Number], Any]]) -> str:
    """The whole file: for every input and every result an array, its numbers × episodes."""
    size = {"f": 4, "i": 4, "b": 1}
    writer, names = _Writer(), {}
    for k, array in enumerate(inputs):
        for place, vector in enumerate(array):
            kind = _type(vector.dtype)
            at = f"in[{k}] + ({place} * n + e) * {size[kind]}"
            names[vector] = writer.variable(vector.dtype, f"load_{kind}({at}, many)")
    for k, (array, dtype) in enumerate(results):
        kind = _type(dtype)
        for place, number in enumerate(array):
            [value] = writer.write([number], names)
            at = f"out[{k}] + ({place} * n + e) * {size[kind]}"
            writer.lines.append(f"store_{kind}({at}, many, {value});")
    each = "\n".join(f"EACH({name})" for name in sorted(EACH))
    body = "\n".join(writer.lines)
    block = (
        f"static void block(char **in, char **out, int64_t n, int64_t e, int many) {{\n{body}\n}}"
    )
    sizes = f"enum {{ INPUTS = {len(inputs)}, OUTPUTS = {len(results)} }};"
    return "\n".join([HEAD, each, sizes, block, TAIL])


# --- the compiler -------------------------------------------------------------------------------------


@functools.cache
def c_compiler() -> tuple[str, bytes] | None:
    """The C compiler, if there is one, and what it says about itself and this processor."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    command = [compiler, *FLAGS, "-dM", "-E", "-x", "c", os.devnull]
    done = subprocess.run(command, capture_output=True, check=False)
    return None if done.returncode else (compiler, done.stdout)


def compiled(inputs: list[list[Vector]], results: list[tuple[list[Number], Any]]) -> str | None:
    """The name for `jax.ffi.ffi_call` of a function that computes the results, or nothing.

    Inputs and results are arrays, given as the list of their numbers; a result has its dtype beside it.
    In memory the episodes are the last axis.
    """
    if c_compiler() is None:
        return None
    try:
        source = _source(inputs, results)
    except _Untranslatable:
        return None
    names = build("the physics", source, "run")
    return names[0] if names else None


@functools.cache
def build(what: str, source: str, *functions: str) -> tuple[str, ...] | None:
    """The names for `jax.ffi.ffi_call` of functions of a C file; nothing where it cannot be compiled."""
    found = c_compiler()
    if found is None:
        return None
    compiler, about = found
    name = "native-" + hashlib.sha256(about + source.encode()).hexdigest()[:16]
    library = files.cache_directory() / f"{name}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        # Elsewhere first: another process may be doing the same.
        with tempfile.TemporaryDirectory(dir=library.parent) as own:
            (Path(own) / "native.c").write_text(source)
            command = [compiler, *FLAGS, "-w", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}"]
            command += [f"{own}/native.c", "-o", f"{own}/native.so", "-lm"]
            if files.is_writer():
                print(f"compiling {what}, once on this machine", file=sys.stderr, flush=True)
            if subprocess.run(command, capture_output=True, check=False).returncode:
                return None
            os.replace(f"{own}/native.so", library)
    loaded = ctypes.CDLL(str(library))
    for function in functions:
        capsule = jax.ffi.pycapsule(getattr(loaded, function))
        jax.ffi.register_ffi_target(f"{name}-{function}", capsule, platform="cpu")
    return tuple(f"{name}-{function}" for function in functions)
