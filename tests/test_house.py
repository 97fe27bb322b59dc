"""The order of the house, read from the source: the method at the root, machinery apart, shapes."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
METHOD = {"me_ls", "pgame_ls", "qdt", "dataset", "envs", "evaluate", "cli"}
FURTHER = {"uncertain"}
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("machinery/*.py")])
}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def test_the_root_holds_the_files_of_the_method_and_nothing_else() -> None:
    found = {path.stem for path in ROOT.glob("*.py")}
    assert found - FURTHER == METHOD


# --- who imports whom -----------------------------------------------------------------------------


def for_types_alone(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def statements(node: ast.AST, inside_functions: bool) -> Iterator[ast.AST]:
    """All nodes that are executed on import; with `inside_functions`, all that ever are."""
    for child in ast.iter_child_nodes(node):
        later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if not for_types_alone(child) and (inside_functions or not later):
            yield child
            yield from statements(child, inside_functions)


def imported(name: str, inside_functions: bool) -> set[str]:
    """The modules of the project that a module imports."""
    found = set()
    for node in statements(TREES[name], inside_functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name} has a relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found & FILES.keys()


def test_the_graph_is_read_correctly() -> None:
    assert {"envs", "machinery.streams"} <= imported("me_ls", False)
    assert "machinery.viewer" in imported("envs", False)  # from machinery import viewer
    assert {"dataset", "me_ls", "machinery.driver"} <= imported("cli", False)


def test_no_module_needs_itself_in_order_to_be_imported() -> None:
    graph = {name: imported(name, False) for name in FILES}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")
    assert set(order) == set(FILES)


def test_the_machinery_knows_nothing_of_the_method() -> None:
    found = {
        name: above
        for name in FILES
        if name.startswith("machinery")
        and (above := {m for m in imported(name, True) if not m.startswith("machinery")})
    }
    assert not found


# --- shapes ---------------------------------------------------------------------------------------

WITHOUT_SHAPE = {"Array", "jax.Array", "jnp.ndarray", "np.ndarray", "numpy.ndarray"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_functions(name: str) -> Iterator[tuple[Function, bool]]:
    """Functions and methods that others may call, and whether they are methods; nested ones are not."""
    for node in TREES[name].body:
        if isinstance(node, Function):
            yield node, False
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from ((method, True) for method in node.body if isinstance(method, Function))


def is_public(function: Function) -> bool:
    return not function.name.startswith("_") or function.name in ("__init__", "__call__")


def parameters(function: Function, is_method: bool) -> list[ast.arg]:
    """All parameters but `self` and `cls`."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    static = any(ast.unparse(d) == "staticmethod" for d in function.decorator_list)
    own = positional[1:] if is_method and not static else positional
    return [x for x in (*own, given.vararg, *given.kwonlyargs, given.kwarg) if x is not None]


def bare_arrays(annotation: ast.expr) -> list[str]:
    """Arrays in an annotation that say nothing of their shape: those that jaxtyping has not wrapped.

    Text is an annotation too; in `Float[Array, "n d"]` the array is wrapped, in `list[Array]` it is not.
    """
    if isinstance(annotation, ast.Constant):
        text = annotation.value
        return bare_arrays(ast.parse(text, mode="eval").body) if isinstance(text, str) else []
    if ast.unparse(annotation) in WITHOUT_SHAPE:
        return [ast.unparse(annotation)]
    if isinstance(annotation, ast.Subscript):
        kind = ast.unparse(annotation.value).split(".")[-1]
        if kind in JAXTYPING or kind in ("Literal", "Annotated"):
            return []
        return bare_arrays(annotation.slice)
    parts = (child for child in ast.iter_child_nodes(annotation) if isinstance(child, ast.expr))
    return [found for part in parts for found in bare_arrays(part)]


JAXTYPING = {
    "Float",
    "Int",
    "Int64",
    "UInt8",
    "UInt32",
    "Bool",
    "Key",
    "Shaped",
    "PyTree",
    "Num",
    "Real",
}


@pytest.mark.parametrize("name", FILES)
def test_every_public_function_says_what_it_takes_and_returns(name: str) -> None:
    silent = []
    for function, is_method in public_functions(name):
        if not is_public(function):
            continue
        where = f"{FILES[name].relative_to(ROOT)}:{function.lineno} {function.name}"
        silent += [f"{where}: {p.arg}" for p in parameters(function, is_method) if not p.annotation]
        if function.returns is None and function.name != "__init__":
            silent.append(f"{where}: what it returns")
    assert not silent


@pytest.mark.parametrize("name", FILES)
def test_every_array_of_a_public_function_has_a_shape(name: str) -> None:
    shapeless = []
    for function, is_method in public_functions(name):
        if is_public(function):
            notes = [p.annotation for p in parameters(function, is_method)] + [function.returns]
            found = [array for note in notes if note for array in bare_arrays(note)]
            where = f"{FILES[name].relative_to(ROOT)}:{function.lineno} {function.name}"
            shapeless += [f"{where}: {array}" for array in found]
    assert not shapeless


def test_types_and_shapes_are_checked_while_the_tests_run() -> None:
    """Of the files at the root, too, wherever they are found."""
    import me_ls
    from machinery import files

    for module in (me_ls, files):
        assert type(module.__loader__).__name__ == "_JaxtypingLoader"
