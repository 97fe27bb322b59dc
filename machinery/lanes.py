"""Lanes: physics on small arrays, computed as arithmetic on long vectors.

A robot's state is a handful of 3-vectors, quaternions and 3×3 matrices. Batched the usual way, arrays
have shapes like (episodes, bodies, 3): the innermost loop runs over three numbers, a CPU's vector units
idle, and half of the time goes into slices, transposes and gathers. `in_lanes` turns the arrays inside
out. When its function is vmapped, every *number* of the state becomes one vector over the episodes:

    traced once for one episode, the function is a list of primitive operations (a jaxpr);
    the list is walked with arrays of vectors, one vector for each number;
    operations that only move numbers around happen here, once, and cost nothing at run time;
    numbers that are known (masses, zeros of a rotation) are folded into what they meet;
    what is left is elementwise arithmetic on vectors, which XLA fuses into a few loops.

The numbers are those of the function itself up to rounding. `spring_step` applies this to one step of
brax's spring physics on a CPU; what it gains is in `docs/decisions.md`. Elsewhere, and for other
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
from jaxtyping import Array, Float

Number = (
    Any  # of one place in an array: a vector over the batch (traced), or a NumPy scalar (known)
)
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
# Known operands that give back the other operand, or decide the result; by side, None for neither.
NEUTRAL = {"mul": (1, 1), "add": (0, 0), "sub": (None, 0), "div": (None, 1)}
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


def _run(*leaves: jax.Array, function: Callable, structure: Any) -> list[jax.Array]:
    single = jax.tree.unflatten(structure, _single(leaves))
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*single)
    walk = _Walk((len(leaves[0]),))
    inputs = [_numbers(x.shape[1:], lambda i, x=x: x[(slice(None), *i)]) for x in leaves]

    def stack(numbers: Numbers, shape: jax.ShapeDtypeStruct) -> jax.Array:
        vectors = [walk.vector(n, shape.dtype) for n in numbers.reshape(-1)]
        return jnp.stack(vectors, axis=1).reshape(-1, *shape.shape)

    return list(map(stack, walk.all(jaxpr, inputs), jax.tree.leaves(shapes)))


batching.primitive_batchers[lanes_p] = _merge
lanes_p.def_impl(_run)
mlir.register_lowering(lanes_p, mlir.lower_fun(_run, multiple_results=True))


def _numbers(shape: tuple[int, ...], value: Callable[[tuple[int, ...]], Number]) -> Numbers:
    filled = np.empty(shape, object)
    for index in np.ndindex(*shape):
        filled[index] = value(index)
    return filled


def _constant(array: Any) -> Numbers:
    array = np.asarray(array)
    return _numbers(array.shape, lambda index: array[index])


def _is_known(number: Number) -> bool:
    return not isinstance(number, jax.Array)


class _Walk:
    """Walks a jaxpr with arrays of numbers; the same operation on the same vectors is done once."""

    def __init__(self, size: tuple[int, ...]):
        self.size = size
        self.done: dict[tuple, tuple[tuple, Number]] = {}

    def vector(self, number: Number, dtype: Any) -> jax.Array:
        return lax.full(self.size, number, dtype) if _is_known(number) else number

    def all(self, closed: ClosedJaxpr, arguments: Iterable[Numbers]) -> list[Numbers]:
        jaxpr = closed.jaxpr
        values = dict(zip(jaxpr.constvars, map(_constant, closed.consts), strict=True))
        values |= dict(zip(jaxpr.invars, arguments, strict=True))

        def read(variable: Any) -> Numbers:
            if isinstance(variable, Literal):
                return _constant(np.asarray(variable.val, variable.val.dtype))
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
        shapes = [(x.shape, aval.dtype) for x, aval in zip(carry, jaxpr.out_avals, strict=True)]

        def vectors(arrays: Iterable[Numbers], walk: _Walk) -> list[list[jax.Array]]:
            pairs = zip(arrays, shapes, strict=True)
            return [[walk.vector(n, dtype) for n in x.reshape(-1)] for x, (_, dtype) in pairs]

        def numbers(lists: list[list[jax.Array]]) -> list[Numbers]:
            arrays = []
            for flat, (shape, _) in zip(lists, shapes, strict=True):
                rest = iter(flat)
                arrays.append(_numbers(shape, lambda _, rest=rest: next(rest)))
            return arrays

        def once(lists: list[list[jax.Array]], _: None) -> tuple[list[list[jax.Array]], None]:
            walk = _Walk(self.size)
            return vectors(walk.all(jaxpr, [*constants, *numbers(lists)]), walk), None

        end, _ = lax.scan(once, vectors(carry, self), length=params["length"])
        return numbers(end)

    def apply(self, primitive: Primitive, params: dict, *operands: Number) -> Number:
        """One scalar operation on every lane; what is known is computed here and now."""
        name, known = primitive.name, [_is_known(x) for x in operands]
        if name == "convert_element_type" and operands[0].dtype == params["new_dtype"]:
            return operands[0]
        if all(known):
            if name in FOLDED:
                return FOLDED[name](*operands)
            with jax.ensure_compile_time_eval():
                return np.asarray(primitive.bind(*map(jnp.asarray, operands), **params))[()]
        if name == "select_n" and known[0]:
            return operands[1 + int(operands[0])]
        for side in range(2) if name in NEUTRAL else ():
            if known[side] and operands[side] == NEUTRAL[name][side]:
                return operands[1 - side]
            if known[side] and name in ABSORBING and operands[side] == ABSORBING[name][side]:
                return operands[side]
        settings = str(params.get("new_dtype", params.get("y")))
        names = [(x.dtype, x.item()) if k else id(x) for x, k in zip(operands, known, strict=True)]
        key = (name, settings, *names)
        if key not in self.done:
            vectors = [self.vector(x, x.dtype) for x in operands]
            # The operands are kept too, so that their ids stay theirs.
            self.done[key] = (operands, primitive.bind(*vectors, **params))
        return self.done[key][1]

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
    from brax import com, kinematics
    from brax.spring.base import State

    x, xd = com.to_world(sys, x_i, xd_i)
    j, jd, a_p, a_c = kinematics.world_to_joint(sys, x, xd)
    q, qd = kinematics.inverse(sys, j, jd)
    i_inv = com.inv_inertia(sys, x)
    mass = sys.link.inertia.mass ** (1 - sys.spring_mass_scale)
    return State(
        q=q, qd=qd, x=x, xd=xd, contact=contact, x_i=x_i, xd_i=xd_i, j=j, jd=jd, a_p=a_p, a_c=a_c,
        i_inv=i_inv, mass=mass,
    )  # fmt: skip


def spring_step(env: Any) -> Callable[[Any, Float[Array, " action"]], Any]:
    """`env.pipeline_step` of a spring environment, in lanes.

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
    def step(x_i: Any, xd_i: Any, contact: Any, action: jax.Array) -> Any:
        def substep(bodies: tuple[Any, Any, Any], _: None) -> tuple[tuple[Any, Any, Any], None]:
            x_i, xd_i, touched = bodies
            after = substep_of(spring_state(sys, x_i, xd_i), action)
            if touched is not None:
                touched = jnp.maximum(touched, after.contact)
            return (after.x_i, after.xd_i, touched), None

        nothing = None if contact is None else jnp.zeros_like(contact)
        return spring_state(sys, *lax.scan(substep, (x_i, xd_i, nothing), length=env._n_frames)[0])

    return lambda state, action: step(state.x_i, state.xd_i, state.contact, action)
