"""The viewer: episodes as one HTML page that plays them in 3D, in any browser, with no network.

Behaviour on demand is best judged by eye: did the robot walk to the target, did its feet touch the
ground as often as they were asked to? `page` packs the robot's shape (`Scene`), its recorded motion
(`Playback`, one per start state) and the target into a single file. The page holds everything it
needs; its own security policy forbids it to fetch anything. With `Live` it may ask one server, the
one it came from, to play another target: that is `machinery/server.py`.

The picture is drawn without WebGL, because a GPU is not always there (a server, a remote desktop, a
test): the ground is plain 2D canvas polygons, and the robot's spheres, capsules and boxes are
ray-cast pixel by pixel with a depth buffer. A robot is some twenty geoms on a tenth of the screen:
little enough work for a browser.

Imports nothing of the project: numpy arrays in, text out.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Shaped

WORLD = -1  # the body index of what does not move
# Torso, limbs, feet: most brax robots come in a single brown, in which legs cannot be told apart.
TORSO, LIMB, FOOT = (0.20, 0.36, 0.58), (0.85, 0.52, 0.27), (0.96, 0.76, 0.45)
UNPAINTED = ((0.5, 0.5, 0.5), (0.4, 0.33, 0.26))  # the default colours of MuJoCo and of brax
LABELS = {"bfoot": "back foot", "ffoot": "front foot"}  # for links with names that say little
# MuJoCo's numbers for the shapes that the page can draw (mjtGeom)
SHAPES = {0: "plane", 2: "sphere", 3: "capsule", 6: "box"}


@dataclass(frozen=True)
class Geom:
    """One rigid shape on a body. Sizes as in MuJoCo; a capsule's: radius, half length along z."""

    shape: Literal["plane", "sphere", "capsule", "box"]
    size: tuple[float, ...]
    colour: tuple[float, ...]  # red, green, blue in [0, 1]
    body: int = WORLD
    position: tuple[float, ...] = (0.0, 0.0, 0.0)  # in the body's frame
    rotation: tuple[float, ...] = (1.0, 0.0, 0.0, 0.0)  # wxyz, in the body's frame


@dataclass(frozen=True)
class Scene:
    """What is seen: the robot's geoms and the ground. `feet` maps the label of a foot to the body
    that lights up when it touches the ground, in the order of the columns of `contacts`."""

    geoms: list[Geom]
    feet: dict[str, int] = field(default_factory=dict)

    @property
    def bodies(self) -> int:
        """How many bodies there must be."""
        return 1 + max((geom.body for geom in self.geoms), default=WORLD)


@dataclass(frozen=True)
class Playback:
    """One episode, a row per step; `descriptor_path` is the descriptor of the steps so far."""

    positions: Float[np.ndarray, "time body 3"]
    rotations: Float[np.ndarray, "time body 4"]  # wxyz, as in brax
    descriptor_path: Float[np.ndarray, "time d"]
    contacts: Shaped[np.ndarray, "time foot"] | None = None  # not 0: the foot touches the ground


def playbacks(
    positions: Float[np.ndarray, "episodes time body 3"],
    rotations: Float[np.ndarray, "episodes time body 4"],
    paths: Float[np.ndarray, "episodes time d"],
    contacts: Shaped[np.ndarray, "episodes time foot"],
) -> list[Playback]:
    """Of several episodes; contacts of no foot at all are none."""
    columns = positions, rotations, paths, contacts if contacts.shape[2] else [None] * len(contacts)
    return [Playback(*episode) for episode in zip(*columns, strict=True)]


def beginning(playback: Playback, steps: int) -> Playback:
    """The first rows of an episode."""
    rows = (x if x is None else x[:steps] for x in vars(playback).values())
    return Playback(*rows)


@dataclass(frozen=True)
class Accuracy:
    """The background of the map: how far from each goal everybody ended who was asked for it."""

    goals: Float[np.ndarray, "goals d"]
    distance: dict[str, Float[np.ndarray, " goals"]]  # by player; NaN where it is not known


@dataclass(frozen=True)
class Live:
    """What a page that is served can ask for."""

    players: dict[str, str]  # the titles of those who can play, by the names they are asked for by
    seed: int  # of the start states that the page opens with
    noise: float  # on the actions, if it is switched on
    parts: int  # of an episode, at the beginning of which the target may change
    accuracy: Accuracy | None = None


def scene_from_brax(sys: Any, feet: Sequence[int] = ()) -> Scene:
    """The geoms of a brax `System`; `feet` are the links whose contact with the ground is shown."""
    parents = set(sys.link_parents)
    model = sys.mj_model
    geoms = []
    for i in range(model.ngeom):
        # MuJoCo counts the world as body 0, brax's links start after it.
        body = int(model.geom_bodyid[i]) - 1
        colour = tuple(float(c) for c in model.geom_rgba[i][:3])
        if np.isclose(colour, UNPAINTED, atol=1e-3).all(axis=1).any():
            colour = TORSO if body == 0 else LIMB if body in parents else FOOT
        shape, size = SHAPES.get(int(model.geom_type[i])), model.geom_size[i]
        position, rotation = model.geom_pos[i], model.geom_quat[i]
        if shape is None:
            # A mesh, an ellipsoid, ...: its bounding box is better than a hole in the robot.
            shape, size = "box", model.geom_aabb[i][3:]
            position = position + rotate(rotation, model.geom_aabb[i][:3])
        geoms.append(Geom(shape, _floats(size), colour, body, _floats(position), _floats(rotation)))
    return Scene(geoms, dict(zip(link_labels(sys, feet), map(int, feet), strict=True)))


def link_labels(sys: Any, feet: Sequence[int]) -> tuple[str, ...]:
    """Names for the feet of a robot; the ant's links have none."""
    names = [sys.link_names[link] or f"foot {k}" for k, link in enumerate(feet, 1)]
    return tuple(LABELS.get(name, name) for name in names)


def point_scene(radius: float = 0.02) -> Scene:
    """A ball on a plane, for a task without physics; good is a hundredth of the plane's width."""
    ground = Geom("plane", (1.0, 1.0, 1.0), (0.5, 0.5, 0.5))
    return Scene([ground, Geom("sphere", (radius,), TORSO, body=0, position=(0.0, 0.0, radius))])


def page(
    title: str,
    scene: Scene,
    playbacks: Sequence[Playback],
    target: Sequence[float] | Float[np.ndarray, " d"],
    bounds: Any,
    kind: Literal["omni", "uni"] = "omni",
    dt: float = 0.05,
    player: str = "model",
    live: Live | None = None,
) -> str:
    """The HTML page that plays `playbacks`.

    `target` is the descriptor that was asked for and `bounds` = (low, high) the descriptor space,
    each a number or one number per dimension. `kind` says what a descriptor is: a place on the
    ground, which is drawn there ('omni'), or shares of ground contact, which are drawn as a chart
    with a lamp per foot ('uni'). `dt` is the time in seconds between two rows of a playback.
    `player` is the name of who plays, and `live` what else the page may ask its server for.
    """
    target = np.asarray(target, float)
    if target.ndim != 1 or (kind == "omni" and target.shape != (2,)):
        raise ValueError(f"The target must be {'x and y' if kind == 'omni' else 'a list'}.")
    low, high = (np.broadcast_to(np.asarray(b, float), target.shape) for b in bounds)
    if not (high > low).all():
        raise ValueError(f"The bounds must be (low, high) with low < high, not {bounds}.")
    if kind not in ("omni", "uni"):
        raise ValueError(f"The kind must be 'omni' or 'uni', not '{kind}'.")
    if not dt > 0:
        raise ValueError(f"The time between two steps must be positive, not {dt}.")
    data = {
        "title": title,
        "kind": kind,
        "dt": float(dt),
        "bounds": [low.tolist(), high.tolist()],
        "geoms": [vars(geom) for geom in scene.geoms],
        "feet": [[label, body] for label, body in scene.feet.items()],
        "played": pack(scene, {player: playbacks}, target),
        "live": live and _pack_live(live),
    }
    # Inside a script element only '<' could end it or open a comment.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    fields = {
        "TITLE": html.escape(title),
        "DATA": text,
        "POLICY": security_policy(live is not None),
    }
    fields |= {"STYLE": _asset("viewer.css"), "SCRIPT": _asset("viewer.js")}
    return re.sub("@@([A-Z]+)@@", lambda match: fields[match[1]], _asset("viewer.html"))


def security_policy(live: bool) -> str:
    """The page's own style and script are allowed, by their checksums, and nothing else."""

    def allowed(asset: str) -> str:
        checksum = hashlib.sha256(("\n" + _asset(asset)).encode()).digest()
        return f"'sha256-{base64.b64encode(checksum).decode()}'"

    policy = f"default-src 'none'; script-src {allowed('viewer.js')}; "
    policy += (
        f"style-src {allowed('viewer.css')}; img-src data:; base-uri 'none'; form-action 'none'"
    )
    return policy + ("; connect-src 'self'" if live else "")


def pack(
    scene: Scene,
    playbacks: dict[str, Sequence[Playback]],
    target: Sequence[float] | Float[np.ndarray, " d"],
) -> dict[str, Any]:
    """What was played towards a target, by player, as the page reads it."""
    target = np.asarray(target, float)
    if not np.isfinite(target).all():
        raise ValueError(f"The target must be finite, not {target.tolist()}.")
    if not playbacks or not all(playbacks.values()):
        raise ValueError("There is no episode to play.")
    players = [
        {
            "name": name,
            "episodes": [_pack(p, i, scene, len(target)) for i, p in enumerate(episodes, 1)],
        }
        for name, episodes in playbacks.items()
    ]
    return {"target": target.tolist(), "players": players}


def _pack_live(live: Live) -> dict[str, Any]:
    accuracy = None
    if live.accuracy is not None:
        distance = {
            name: [round(float(x), 5) if np.isfinite(x) else None for x in values]
            for name, values in live.accuracy.distance.items()
        }
        accuracy = {"goals": [_floats(goal) for goal in live.accuracy.goals], "distance": distance}
    return vars(live) | {"players": list(live.players.items()), "accuracy": accuracy}


def _asset(name: str) -> str:
    return (Path(__file__).parent / "page" / name).read_text(encoding="utf-8")


def check(playback: Playback, number: int, scene: Scene, d: int) -> None:
    """Raises a ValueError if episode `number` cannot be shown."""
    bodies = scene.bodies
    if bodies == 0:
        raise ValueError("The scene has no geom that moves.")
    steps, contacts = len(playback.positions), playback.contacts
    expected = {
        "positions": ("time", "body", 3),
        "rotations": ("time", "body", 4),
        "descriptor_path": ("time", d),
    }
    sizes = {"time": steps, "body": playback.positions.shape[1]}
    for name, axes in expected.items():
        array = getattr(playback, name)
        if steps == 0 or array.shape != tuple(sizes.get(axis, axis) for axis in axes):
            raise ValueError(f"Episode {number}: {name} has shape {array.shape}, not {axes}.")
        diverged = ~np.isfinite(array).reshape(steps, -1).all(axis=1)
        if diverged.any():
            first = diverged.argmax()
            raise ValueError(f"Episode {number} diverged at step {first}: it cannot be played.")
    if sizes["body"] < bodies:
        raise ValueError(f"Episode {number} moves {sizes['body']} bodies, the scene has {bodies}.")
    if contacts is not None and (contacts.ndim != 2 or len(contacts) != steps):
        raise ValueError(f"Episode {number}: contacts needs a row for each of {steps} steps.")


def _pack(playback: Playback, number: int, scene: Scene, d: int) -> dict[str, Any]:
    """The arrays of episode `number` as text, after a check that the page can play them."""
    check(playback, number, scene, d)
    contacts, bodies = playback.contacts, scene.bodies
    return {
        "steps": len(playback.positions),
        "bodies": bodies,
        "feet": 0 if contacts is None else contacts.shape[1],
        "positions": _base64(playback.positions[:, :bodies]),
        "rotations": _base64(playback.rotations[:, :bodies]),
        "descriptors": _base64(playback.descriptor_path),
        "contacts": None if contacts is None else _base64(contacts),
    }


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array, "<f4").tobytes()).decode("ascii")


def _floats(array: np.ndarray) -> tuple[float, ...]:
    return tuple(round(float(value), 5) for value in array)


def rotate(
    quaternion: Float[np.ndarray, "4"], vector: Float[np.ndarray, "3"]
) -> Float[np.ndarray, "3"]:
    """The vector, turned by a quaternion wxyz."""
    w, axis = quaternion[0], quaternion[1:]
    turn = 2 * np.cross(axis, vector)
    return vector + w * turn + np.cross(axis, turn)
