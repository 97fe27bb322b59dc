"""Lanes: physics on small arrays, computed as arithmetic on long vectors.

A robot's state is a handful of 3-vectors, quaternions and 3×3 matrices. Batched the usual way, arrays
have shapes like (episodes, bodies, 3): the innermost loop runs over three numbers, a CPU's vector units
idle, and half of the time goes into slices, transposes and gathers. `in_lanes` turns the arrays inside
out. When its function is vmapped, every *number* of the state becomes one vector over the episodes:

    traced once for one episode, the function is a list of primitive operations (a jaxpr);
    the list is walked with arrays of vectors, one vector for each number;
    operations that only move numbers around happen here, once, and cost nothing at run time;
    numbers that are known (masses, zeros of a rotation) are folded into what they meet;
    what is left is a formula: elementwise arithmetic on vectors. On a CPU it becomes one C function if
    there is a compiler (`machinery/native.py`); otherwise XLA fuses it into loops.

The numbers are those of the function itself up to rounding. `spring_step` applies this to one step of
brax's spring physics on a CPU; what it gains is in `docs/journal.md`. Elsewhere, and for other
backends, brax's own step is used.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Literal, Primitive
from jax.interpreters import batching, mlir

from machinery.native import Loop, Number, Vector, compiled, is_known, needed, operations

Numbers = np.ndarray  # array of dtype object, its elements are `Number`

FOLDED = {
    "mul": np.multiply,
    "add": np.add,
    "sub": np.subtract,
    "neg": np.negative,
    "div": np.divide,
    "lt": np.less,
    "gt": np.greater,
    "le": np.less_equal,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.logical_and,
    "or": np.logical_or,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "rem": np.fmod,
    "is_finite": np.isfinite,
}
REDUCTIONS = {
    "reduce_sum": lax.add_p,
    "reduce_or": lax.or_p,
    "reduce_and": lax.and_p,
    "reduce_max": lax.max_p,
    "reduce_min": lax.min_p,
}
ELEMENTWISE = {
    *FOLDED, "not", "xor", "sign", "floor", "ceil", "round", "rem", "clamp", "select_n", "is_finite",
    "exp", "exp2", "expm1", "log", "log1p", "rsqrt", "cbrt", "square", "pow", "integer_pow", "logistic",
    "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "erf",
    "convert_element_type", "stop_gradient", "nextafter",
}  # fmt: skip
COMMUTATIVE = {"mul", "add", "max", "min", "and", "or", "eq", "ne"}
COMPARISONS = {"lt", "gt", "le", "ge", "eq", "ne", "is_finite"}
# Known operands that give back the other operand, or decide the result; by side, None for neither.
NEUTRAL = {
    "mul": (1, 1), "add": (0, 0), "sub": (None, 0), "div": (None, 1),
    "max": (-np.inf, -np.inf), "min": (np.inf, np.inf),
}  # fmt: skip
ABSORBING = {"mul": (0, 0), "div": (0, None)}


def in_lanes(function: Callable) -> Callable:
    """`function` of arrays; under `vmap` it is computed with one vector per number."""

    @jax.custom_batching.custom_vmap
    def one(*arguments: Any) -> Any:
        return function(*arguments)

    @one.def_vmap
    def many(size: int, batched: Any, *arguments: Any) -> tuple[Any, Any]:
        def whole(x: Any, is_batched: bool) -> Any:
            return x if is_batched else jnp.broadcast_to(x, (size, *jnp.shape(x)))

        leaves, structure = jax.tree.flatten(jax.tree.map(whole, arguments, tuple(batched)))
        result = lanes_p.bind(*leaves, function=function, structure=structure)
        out = jax.tree.structure(_shapes(function, structure, _single(leaves)))
        return jax.tree.unflatten(out, result), jax.tree.unflatten(out, [True] * len(result))

    return one


# The batched function is a primitive of its own, so that a further `vmap` makes its one batch axis
# longer instead of adding a second one, and so that the walk happens once, when all is known.
lanes_p = Primitive("lanes")
lanes_p.multiple_results = True


def _single(leaves: Iterable[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in leaves)


@functools.cache
def _shapes(function: Callable, structure: Any, single: tuple[jax.ShapeDtypeStruct, ...]) -> Any:
    return jax.eval_shape(function, *jax.tree.unflatten(structure, single))


@lanes_p.def_abstract_eval
def _abstract(*leaves: Any, function: Callable, structure: Any) -> list[ShapedArray]:
    shapes = jax.tree.leaves(_shapes(function, structure, _single(leaves)))
    return [ShapedArray((leaves[0].shape[0], *s.shape), s.dtype) for s in shapes]


def _merge(arguments: Any, axes: Any, *, function: Callable, structure: Any) -> tuple[list, list]:
    """`vmap` of what is already batched: both batch axes become one, and two again afterwards."""
    new = next(x.shape[a] for x, a in zip(arguments, axes, strict=True) if a is not None)

    def flat(x: Any, axis: int | None) -> Any:
        x = jnp.broadcast_to(x, (new, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        return x.reshape(-1, *x.shape[2:])

    leaves = [flat(x, a) for x, a in zip(arguments, axes, strict=True)]
    result = lanes_p.bind(*leaves, function=function, structure=structure)
    return [x.reshape(new, -1, *x.shape[1:]) for x in result], [0] * len(result)


@functools.cache
def _formula(function: Callable, structure: Any, single: tuple[jax.ShapeDtypeStruct, ...]) -> Any:
    """The numbers that go in, the numbers that come out, and the shapes of the results."""
    arguments = jax.tree.unflatten(structure, single)
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    inputs = [_numbers(x.shape, lambda _, x=x: Vector(np.dtype(x.dtype))) for x in single]
    flat = [list(x.reshape(-1)) for x in inputs]
    results = [list(x.reshape(-1)) for x in _Walk().all(jaxpr, inputs)]
    return flat, results, jax.tree.leaves(shapes)


def count(function: Callable, *arguments: Any) -> int:
    """The scalar operations of one call of a function that uses `in_lanes`; arguments may be shapes."""
    batched = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), arguments)
    total = 0
    for equation in jax.make_jaxpr(jax.vmap(function))(*batched).eqns:
        if equation.primitive is lanes_p:
            leaves: list[Any] = [variable.aval for variable in equation.invars]
            _, results, _ = _formula(**equation.params, single=_single(leaves))
            total += operations([number for x in results for number in x])
    return total


def _by_xla(*leaves: jax.Array, function: Callable, structure: Any) -> list[jax.Array]:
    inputs, results, shapes = _formula(function, structure, _single(leaves))
    size = leaves[0].shape[:1]
    values = {
        vector: column
        for x, vectors in zip(leaves, inputs, strict=True)
        for vector, column in zip(vectors, x.reshape(*size, -1).T, strict=True)
    }

    def stack(numbers: list[Number], shape: jax.ShapeDtypeStruct) -> jax.Array:
        vectors = [x.astype(shape.dtype) for x in _vectors(numbers, values, size)]
        return jnp.stack(vectors, axis=1).reshape(*size, *shape.shape)

    return list(map(stack, results, shapes))


def _vectors(
    results: list[Number], values: dict[Vector, jax.Array], size: tuple[int, ...]
) -> list[jax.Array]:
    """The results as arrays over the episodes; what they need is computed, and added to the values."""

    def array(x: Number) -> jax.Array:
        return lax.full(size, x, x.dtype) if is_known(x) else values[x]

    def repeat(loop: Loop) -> list[jax.Array]:
        def once(carried: list[jax.Array], _: None) -> tuple[list[jax.Array], None]:
            inside = values | dict(zip(loop.inside, carried, strict=True))
            return _vectors(loop.after, inside, size), None

        return lax.scan(once, _vectors(loop.start, values, size), length=loop.length)[0]

    for vector in needed(results, values):
        if vector.operation == "loop":
            loop: Loop = vector.params["loop"]
            values |= zip(loop.outside, repeat(loop), strict=True)
        else:
            values[vector] = vector.primitive.bind(*map(array, vector.operands), **vector.params)
    return [array(x) for x in results]


def _by_compiler(*leaves: jax.Array, function: Callable, structure: Any) -> list[jax.Array]:
    """On a CPU with a C compiler: one call, on arrays whose last axis in memory is the episodes."""
    inputs, results, shapes = _formula(function, structure, _single(leaves))
    name = compiled(inputs, [(x, s.dtype) for x, s in zip(results, shapes, strict=True)])
    if name is None:
        return _by_xla(*leaves, function=function, structure=structure)
    whole = [jax.ShapeDtypeStruct((len(leaves[0]), *s.shape), s.dtype) for s in shapes]
    call = jax.ffi.ffi_call(
        name,
        whole,
        input_layouts=[(*range(1, x.ndim), 0) for x in leaves],
        output_layouts=[(*range(1, len(x.shape)), 0) for x in whole],
    )
    return list(call(*leaves))


def _at_once(*leaves: jax.Array, **params: Any) -> list[jax.Array]:
    return jax.jit(lambda *x: lanes_p.bind(*x, **params))(*leaves)


batching.primitive_batchers[lanes_p] = _merge
lanes_p.def_impl(_at_once)
mlir.register_lowering(lanes_p, mlir.lower_fun(_by_xla, multiple_results=True))
mlir.register_lowering(lanes_p, mlir.lower_fun(_by_compiler, multiple_results=True), "cpu")


def _numbers(shape: tuple[int, ...], value: Callable[[tuple[int, ...]], Number]) -> Numbers:
    filled = np.empty(shape, object)
    for index in np.ndindex(*shape):
        filled[index] = value(index)
    return filled


def _constant(array: Any) -> Numbers:
    array = np.asarray(array)
    return _numbers(array.shape, lambda index: array[index])


def _dtype(name: str, params: dict, operands: tuple[Number, ...]) -> np.dtype:
    """Of the result of an elementwise operation."""
    if name in COMPARISONS:
        return np.dtype(bool)
    return np.dtype(params.get("new_dtype") or operands[name == "select_n"].dtype)


class _Walk:
    """Walks a jaxpr with arrays of numbers; the same operation on the same numbers is done once."""

    def __init__(self) -> None:
        self.done: dict[tuple, Vector] = {}

    def all(self, closed: ClosedJaxpr, arguments: Iterable[Numbers]) -> list[Numbers]:
        jaxpr = closed.jaxpr
        values = dict(zip(jaxpr.constvars, map(_constant, closed.consts), strict=True))
        values |= dict(zip(jaxpr.invars, arguments, strict=True))

        def read(variable: Any) -> Numbers:
            if isinstance(variable, Literal):
                aval: Any = variable.aval
                return _constant(np.asarray(variable.val, aval.dtype))
            return values[variable]

        for equation in jaxpr.eqns:
            results = self.equation(equation, *map(read, equation.invars))
            values |= dict(zip(equation.outvars, results, strict=True))
        return [np.asarray(read(variable), object) for variable in jaxpr.outvars]

    def equation(self, equation: Any, *inputs: Numbers) -> list[Numbers]:
        """The results of one equation: a call, a movement, a reduction, or elementwise arithmetic."""
        name, params = equation.primitive.name, equation.params
        shape = equation.outvars[0].aval.shape
        inner = params.get("jaxpr", params.get("call_jaxpr"))
        if name == "cond":  # on something known, or there would be no list of operations
            return self.all(params["branches"][int(inputs[0].item())], inputs[1:])
        if name == "platform_index":
            platforms = params["platforms"]
            return [_constant(np.int32([p is None or "cpu" in p for p in platforms].index(True)))]
        if name == "scan":
            return self.loop(params, inputs)
        if inner is not None and name != "scatter-add":
            return self.all(inner, inputs)
        if name in ("copy", "device_put", "reshard"):
            return list(inputs)
        if name in MOVES:
            return [MOVES[name](params, shape, *inputs)]
        if name == "scatter-add":
            return [self.scatter_add(equation, *inputs)]
        if name == "dot_general":
            return [self.dot(params["dimension_numbers"], shape, *inputs)]
        if name in REDUCTIONS:
            axes = params["axes"]
            rows = np.moveaxis(inputs[0], axes, range(-len(axes), 0)).reshape(*shape, -1)
            return [_numbers(shape, lambda i: self.total(REDUCTIONS[name], rows[i]))]
        if name not in ELEMENTWISE:
            raise TypeError(f"a function with the operation {name!r} cannot be computed in lanes")
        same = [np.broadcast_to(x, shape) for x in inputs]
        return [
            _numbers(shape, lambda i: self.apply(equation.primitive, params, *(x[i] for x in same)))
        ]

    def loop(self, params: dict, inputs: tuple[Numbers, ...]) -> list[Numbers]:
        """A `scan` that only repeats: what it carries stays in lanes from one pass to the next."""
        constants, carry = inputs[: params["num_consts"]], inputs[params["num_consts"] :]
        jaxpr = params["jaxpr"]
        assert len(carry) == params["num_carry"] == len(jaxpr.out_avals), "only a plain loop"
        inside = [
            _numbers(x.shape, lambda _, a=aval: Vector(np.dtype(a.dtype)))
            for x, aval in zip(carry, jaxpr.out_avals, strict=True)
        ]

        def flat(arrays: Iterable[Numbers]) -> list[Number]:
            return [number for x in arrays for number in x.reshape(-1)]

        after = self.all(jaxpr, [*constants, *inside])
        loop = Loop(params["length"], flat(carry), flat(inside), flat(after))
        for vector in loop.inside:
            loop.outside.append(Vector(vector.dtype, "loop", (*loop.start,), {"loop": loop}))
        rest = iter(loop.outside)
        return [_numbers(x.shape, lambda _: next(rest)) for x in carry]

    def apply(self, primitive: Primitive, params: dict, *operands: Number) -> Number:
        """One scalar operation on every lane; what is known is computed here and now."""
        name, known = primitive.name, [is_known(x) for x in operands]
        if name == "convert_element_type" and operands[0].dtype == params["new_dtype"]:
            return operands[0]
        if name == "select_n" and known[0]:
            return operands[1 + int(operands[0])]
        if all(known):
            if name in FOLDED and (name != "div" or operands[0].dtype.kind == "f"):
                return FOLDED[name](*operands).astype(_dtype(name, params, operands))
            if name == "convert_element_type":
                return np.dtype(params["new_dtype"]).type(operands[0])
            with jax.ensure_compile_time_eval():
                return np.asarray(primitive.bind(*map(jnp.asarray, operands), **params))[()]
        for side in range(2) if name in NEUTRAL else ():
            if known[side] and operands[side] == NEUTRAL[name][side]:
                return operands[1 - side]
            if known[side] and name in ABSORBING and operands[side] == ABSORBING[name][side]:
                return operands[side]
        settings = str(params.get("new_dtype", params.get("y")))
        names = [(x.dtype, x.item()) if k else id(x) for x, k in zip(operands, known, strict=True)]
        key = (name, settings, *(sorted(names, key=str) if name in COMMUTATIVE else names))
        if key not in self.done:
            dtype = _dtype(name, params, operands)
            self.done[key] = Vector(dtype, name, operands, params, primitive)
        return self.done[key]

    def total(self, primitive: Primitive, terms: Iterable[Number]) -> Number:
        return functools.reduce(lambda a, b: self.apply(primitive, {}, a, b), terms)

    def dot(
        self, dimensions: Any, shape: tuple[int, ...], left: Numbers, right: Numbers
    ) -> Numbers:
        """Batch axes first, contracted axes last and in one; then sums of products."""

        def arrange(x: Numbers, contracted: tuple, batch: tuple) -> Numbers:
            free = [i for i in range(x.ndim) if i not in (*contracted, *batch)]
            kept = [x.shape[i] for i in (*batch, *free)]
            return x.transpose(*batch, *free, *contracted).reshape(*kept, -1)

        (left_contracted, right_contracted), (left_batch, right_batch) = dimensions
        a = arrange(left, left_contracted, left_batch)
        b = arrange(right, right_contracted, right_batch)
        batch, free = len(left_batch), a.ndim - 1

        def element(i: tuple[int, ...]) -> Number:
            pairs = zip(a[i[:free]], b[i[:batch] + i[free:]], strict=True)
            return self.total(lax.add_p, [self.apply(lax.mul_p, {}, x, y) for x, y in pairs])

        return _numbers(shape, element)

    def scatter_add(self, equation: Any, target: Numbers, at: Numbers, updates: Numbers) -> Numbers:
        """Finds by scattering unit vectors which updates land on which element."""
        params, indices = equation.params, np.asarray(at, equation.invars[1].aval.dtype)
        units = np.eye(updates.size, dtype=np.float32).reshape(updates.size, *updates.shape)

        def scatter(update: jax.Array) -> jax.Array:
            zeros = jnp.zeros(target.shape)
            return lax.scatter_add(
                zeros, indices, update, params["dimension_numbers"], mode=params["mode"]
            )

        with jax.ensure_compile_time_eval():
            lands = np.asarray(jax.vmap(scatter)(jnp.asarray(units))) != 0
        flat = updates.reshape(-1)
        return _numbers(
            target.shape,
            lambda i: self.total(lax.add_p, [target[i], *flat[lands[(slice(None), *i)]]]),
        )


# --- operations that only move numbers --------------------------------------------------------------


def _places(move: Callable[[jax.Array], jax.Array], like: Numbers) -> np.ndarray:
    """Where each number of the result comes from: the move applied to the places themselves."""
    with jax.ensure_compile_time_eval():
        return np.asarray(move(jnp.arange(like.size, dtype=jnp.int32).reshape(like.shape)))


def _gather(params: dict, shape: tuple[int, ...], x: Numbers, at: Numbers) -> Numbers:
    indices = np.asarray(at, np.int32)
    dimensions, sizes = params["dimension_numbers"], params["slice_sizes"]
    places = _places(
        lambda p: lax.gather(p, jnp.asarray(indices), dimensions, sizes, mode=params["mode"]), x
    )
    return x.reshape(-1)[places]


def _pad(params: dict, shape: tuple[int, ...], x: Numbers, value: Numbers) -> Numbers:
    places = _places(lambda p: lax.pad(p, np.int32(x.size), params["padding_config"]), x)
    return np.append(x, value)[places]


def _broadcast(params: dict, shape: tuple[int, ...], x: Numbers) -> Numbers:
    new = [i for i in range(len(shape)) if i not in params["broadcast_dimensions"]]
    return np.broadcast_to(np.expand_dims(x, new), shape)


def _slice(params: dict, shape: tuple[int, ...], x: Numbers) -> Numbers:
    strides = params["strides"] or [1] * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


MOVES: dict[str, Callable[..., Numbers]] = {
    "squeeze": lambda params, shape, x: x.reshape(shape),
    "reshape": lambda params, shape, x: x.reshape(shape),
    "transpose": lambda params, shape, x: x.transpose(params["permutation"]),
    "concatenate": lambda params, shape, *xs: np.concatenate(xs, params["dimension"]),
    "stack": lambda params, shape, *xs: np.stack(xs, params["axis"]),
    "rev": lambda params, shape, x: np.flip(x, params["dimensions"]),
    "tile": lambda params, shape, x: np.tile(x, params["reps"]),
    "iota": lambda params, shape: _numbers(
        shape, lambda i: params["dtype"].type(i[params["dimension"]])
    ),
    "slice": _slice,
    "broadcast_in_dim": _broadcast,
    "pad": _pad,
    "gather": _gather,
}


# --- one step of brax's spring physics --------------------------------------------------------------


def spring_state(sys: Any, x_i: Any, xd_i: Any, contact: Any = None) -> Any:
    """All that brax's spring physics carries; it follows from the bodies' positions and velocities."""
    return _rest(sys, *_seen(sys, x_i, xd_i), contact)


def _seen(sys: Any, x_i: Any, xd_i: Any) -> tuple:
    """What follows from the bodies and environments read: world frame and joint angles."""
    from brax import com, kinematics

    x, xd = com.to_world(sys, x_i, xd_i)
    j, jd, _, _ = kinematics.world_to_joint(sys, x, xd)
    return x_i, xd_i, x, xd, *kinematics.inverse(sys, j, jd)


def _rest(sys: Any, *seen_and_contact: Any) -> Any:
    """All that brax carries; what nobody reads of it is left out, by `lanes` and by XLA."""
    from brax import com, kinematics
    from brax.spring.base import State

    x_i, xd_i, x, xd, q, qd, contact = seen_and_contact
    j, jd, a_p, a_c = kinematics.world_to_joint(sys, x, xd)
    i_inv = com.inv_inertia(sys, x)
    mass = sys.link.inertia.mass ** (1 - sys.spring_mass_scale)
    return State(
        q=q, qd=qd, x=x, xd=xd, contact=contact, x_i=x_i, xd_i=xd_i, j=j, jd=jd, a_p=a_p, a_c=a_c,
        i_inv=i_inv, mass=mass,
    )  # fmt: skip


def spring_step(env: Any) -> Callable[[Any, Any], Any]:
    """`env.pipeline_step` of a spring environment, in lanes: of a physics state and an action.

    Only the bodies' positions and velocities pass from one sub-step to the next (and, of a robot of
    `robot_v1.py`, which links touched the ground); whatever a sub-step computes beyond them is never
    computed at all.
    """
    from brax.spring import pipeline

    sys = env.sys
    substep_of = getattr(
        env, "substep", lambda physics, action: pipeline.step(sys, physics, action)
    )

    @in_lanes
    def step(x_i: Any, xd_i: Any, contact: Any, action: jax.Array) -> tuple:
        def substep(bodies: tuple[Any, Any, Any], _: None) -> tuple[tuple[Any, Any, Any], None]:
            x_i, xd_i, touched = bodies
            after = substep_of(spring_state(sys, x_i, xd_i), action)
            if touched is not None:
                touched = jnp.maximum(touched, after.contact)
            return (after.x_i, after.xd_i, touched), None

        none = None if contact is None else jnp.zeros_like(contact)
        x_i, xd_i, touched = lax.scan(substep, (x_i, xd_i, none), length=env._n_frames)[0]
        return *_seen(sys, x_i, xd_i), touched

    return lambda state, action: _rest(sys, *step(state.x_i, state.xd_i, state.contact, action))
