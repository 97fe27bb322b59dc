"""Pictures: the viewer's episodes as a GIF or a video, drawn on the CPU without a browser.

What `page/viewer.js` does for a browser, in NumPy: the ground is a plane that every ray meets somewhere,
the robot's spheres, capsules and boxes are ray-cast with a depth buffer. Several targets are fields of one
picture, all seen from the same place, so that one sees where each robot goes.

Reads in this order: what is shown, the camera, shapes and rays, one picture, files.
Imports of the project only the viewer's shapes and how files are written.
"""

import math
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, UInt8
from PIL import Image, ImageDraw, ImageFont

from machinery.files import UserError, write_safely
from machinery.viewer import WORLD, Geom, Playback, Scene, check, rotate

Vector = Float[np.ndarray, "3"]
Pixels = Float[np.ndarray, "height width"]
Ray = Float[np.ndarray, "#height #width"]  # a coordinate of rays (x, y, 1); x the same in all rows
Picture = Float[np.ndarray, "height width 3"]

FINE = 2  # rays per pixel and axis
FIELD = {1: (480, 360), 2: (320, 240)}  # pixels of a field, by how many stand in a row
SMALL_FIELD = (240, 180)
GIF_SECONDS = 0.08  # between two pictures, about; a video has every step
HOLD_SECONDS = 1.0  # that the last picture stays
COLOURS = 48  # of a GIF: fewer make it smaller
FFMPEG = "ffmpeg"

TARGET, CONTACT, PATH = (0.88, 0.08, 0.36), (0.07, 0.78, 0.45), (0.12, 0.44, 0.92)
POLE = (1.0, 0.2, 0.48)
SKY, HAZE, FLOOR, TILE = (
    np.array([int(code[i : i + 2], 16) for i in (0, 2, 4)]) / 255
    for code in ("bcd3e8", "eef3f7", "dbe2e8", "788ca0")
)


# --- what is shown ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Animation:
    """One episode towards each target; bounds, kind and dt as in `viewer.page`."""

    scene: Scene
    playbacks: Sequence[Playback]
    targets: Sequence[Sequence[float]]
    bounds: tuple[Sequence[float], Sequence[float]]
    kind: Literal["omni", "uni"]
    dt: float

    def __post_init__(self) -> None:
        for number, (playback, target) in enumerate(
            zip(self.playbacks, self.targets, strict=True), 1
        ):
            check(playback, number, self.scene, len(target))

    @property
    def steps(self) -> int:
        return len(self.playbacks[0].positions)

    @property
    def columns(self) -> int:
        return math.ceil(math.sqrt(len(self.playbacks)))

    @cached_property
    def ground(self) -> float:
        return next((g.position[2] for g in self.scene.geoms if g.shape == "plane"), 0.0)

    @cached_property
    def unit(self) -> float:
        """Of length: the robot's reach, or a fortieth of the plane's width if that is more."""
        low, high = self.bounds
        start = self.playbacks[0].positions[0, 0]
        reach = [
            np.linalg.norm(tip - start) + solid.radius
            for solid in robot(self.scene, self.playbacks[0], 0)
            for tip in (solid.tail, solid.head)
        ]
        return float(max(reach + ([(high[0] - low[0]) / 40] if self.kind == "omni" else [])))

    @cached_property
    def overview(self) -> "Camera":
        """From where all ways and all targets are in the picture."""
        ways = [p.positions[:, 0, :2] for p in self.playbacks]
        points = np.concatenate([*ways, np.array(self.targets)])
        (west, south), (east, north) = points.min(axis=0), points.max(axis=0)
        corners = [
            (x, y, z)
            for x in (west, east)
            for y in (south, north)
            for z in (self.ground, self.ground + 2.2 * self.unit)
        ]
        far = self.unit
        while True:
            # Looking a little beyond the middle leaves room for the text above.
            focus = np.array([(west + east) / 2, (south + north) / 2 + 0.1 * far, self.ground])
            camera = self.camera(focus, far, pitch=0.79)
            if camera.shows(np.array(corners)):
                return camera
            far *= 1.05

    def following(self, playback: Playback, row: int) -> "Camera":
        x, y = playback.positions[row, 0, :2]
        return self.camera(
            np.array([x, y, self.ground + 0.6 * self.unit]), 3.8 * self.unit, pitch=0.2
        )

    def camera(self, focus: Vector, far: float, pitch: float) -> "Camera":
        width, height = FIELD.get(self.columns, SMALL_FIELD)
        return Camera(focus.astype(float), far, pitch, FINE * width, FINE * height)


# --- the camera: x to the right, y up, z into the picture -------------------------------------------


@dataclass(frozen=True)
class Camera:
    """Looks at `focus` from the south, from a distance and an angle above the ground."""

    focus: Vector
    far: float
    pitch: float
    width: int
    height: int

    @cached_property
    def axes(self) -> Float[np.ndarray, "3 3"]:
        """Right, up and forward."""
        sine, cosine = math.sin(self.pitch), math.cos(self.pitch)
        return np.array([[1.0, 0.0, 0.0], [0.0, sine, cosine], [0.0, cosine, -sine]])

    @property
    def eye(self) -> Vector:
        return self.focus - self.far * self.axes[2]

    @property
    def focal(self) -> float:
        return min(self.width, 1.25 * self.height)

    def turned(self, vector: Float[np.ndarray, "*n 3"]) -> Float[np.ndarray, "*n 3"]:
        return vector @ self.axes.T

    def seen(self, point: Float[np.ndarray, "*n 3"]) -> Float[np.ndarray, "*n 3"]:
        return self.turned(point - self.eye)

    def on_screen(self, seen: Float[np.ndarray, "*n 3"]) -> Float[np.ndarray, "*n 2"]:
        middle = np.array([self.width / 2, self.height / 2])
        return middle + self.focal * seen[..., :2] / seen[..., 2:] * np.array([1.0, -1.0])

    def shows(self, points: Float[np.ndarray, "n 3"]) -> bool:
        """Whether these points are all in the picture, not at its border and not where the text is."""
        seen = self.seen(points)
        x, y = (self.on_screen(seen) / np.array([self.width, self.height])).T
        inside = (np.abs(x - 0.5) < 0.45) & (y > 0.2) & (y < 0.95)
        return bool((inside & (seen[:, 2] > 0)).all())

    def rays(
        self, rows: slice, columns: slice
    ) -> tuple[Float[np.ndarray, "1 width"], Float[np.ndarray, "height 1"]]:
        """The rays (x, y, 1) through some of the pixels."""
        x = (np.arange(columns.start, columns.stop) + 0.5 - self.width / 2) / self.focal
        y = (self.height / 2 - np.arange(rows.start, rows.stop) - 0.5) / self.focal
        return x[None, :], y[:, None]

    @cached_property
    def landing(self) -> Float[np.ndarray, "height width 3"]:
        """Per unit of height of the eye above the ground: the way to where each ray meets it."""
        x, y = self.rays(slice(0, self.height), slice(0, self.width))
        right, up, forward = self.axes
        ray = forward + x[..., None] * right + y[..., None] * up
        with np.errstate(divide="ignore"):
            return np.where(ray[..., 2:] < 0, ray / -ray[..., 2:], np.inf)

    def extent(
        self, tail: Vector, head: Vector, radius: float, margin: float = 0.0
    ) -> tuple[slice, slice] | None:
        """The rectangle of pixels that a capsule can touch."""
        ends = self.seen(np.stack([tail, head]))
        if (ends[:, 2] < 1.05 * radius).any():
            return None  # the camera is inside, or the shape behind it
        beside = self.focal * radius / (ends[:, 2:] - radius)
        beside = beside * (1 + np.abs(ends[:, :2] / ends[:, 2:])) + margin
        places = self.on_screen(ends)
        low = np.floor((places - beside).min(axis=0)).astype(int)
        high = np.ceil((places + beside).max(axis=0)).astype(int)
        low, high = np.maximum(low, 0), np.minimum(high, [self.width, self.height])
        if (low >= high).any():
            return None
        return slice(low[1], high[1]), slice(low[0], high[0])


# --- shapes and rays --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Solid:
    """A capsule from tail to head, a ball where they are the same; or a box along these axes."""

    tail: Vector
    head: Vector
    radius: float
    colour: tuple[float, ...]
    axes: Float[np.ndarray, "3 3"] | None = None
    half: tuple[float, ...] = ()


def robot(scene: Scene, playback: Playback, row: int) -> list[Solid]:
    """The shapes at one moment; feet that touch the ground light up."""
    contacts = playback.contacts
    feet = zip(scene.feet.values(), () if contacts is None else contacts[row], strict=False)
    lit = {body for body, touches in feet if touches}
    geoms = [geom for geom in scene.geoms if geom.shape != "plane"]
    return [_solid(geom, playback, row, geom.body in lit) for geom in geoms]


def _solid(geom: Geom, playback: Playback, row: int, is_lit: bool) -> Solid:
    place, turn = np.zeros(3), np.array([1.0, 0.0, 0.0, 0.0])
    if geom.body != WORLD:
        place, turn = playback.positions[row, geom.body], playback.rotations[row, geom.body]
    centre = place + rotate(turn, np.array(geom.position))
    colour = CONTACT if is_lit else geom.colour
    own = np.array(geom.rotation)
    if geom.shape == "box":
        axes = np.stack([rotate(turn, rotate(own, axis)) for axis in np.eye(3)])
        longest = int(np.argmax(geom.size))
        reach = geom.size[longest] * axes[longest]
        thin = min(geom.size)
        return Solid(centre - reach, centre + reach, thin, colour, axes, geom.size)
    reach = np.zeros(3)
    if geom.shape == "capsule":
        reach = rotate(turn, rotate(own, np.array([0.0, 0.0, geom.size[1]])))
    return Solid(centre - reach, centre + reach, geom.size[0], colour)


# Where rays (x, y, 1) meet a shape: how far along, infinity where they miss it, and the normal there.
Meeting = tuple[Pixels, tuple[Pixels, Pixels, Pixels]]


def meet_ball(x: Ray, y: Ray, centre: Vector, radius: float) -> Meeting:
    a = x * x + y * y + 1
    b = x * centre[0] + y * centre[1] + centre[2]
    h = b * b - a * (centre @ centre - radius**2)
    t = np.where(h >= 0, (b - np.sqrt(np.maximum(h, 0))) / a, np.inf)
    reach = np.where(np.isfinite(t), t, 0.0)
    normal = tuple((reach * r - c) / radius for r, c in zip((x, y, 1.0), centre, strict=True))
    return np.where(t > 0, t, np.inf), normal


def meet_capsule(x: Ray, y: Ray, tail: Vector, head: Vector, radius: float) -> Meeting:
    """The cylinder around the axis, or the ball at the end beyond which it is met."""
    along = head - tail
    length = along @ along
    if length < 1e-12:
        return meet_ball(x, y, tail, radius)
    dr, ar = (v[0] * x + v[1] * y + v[2] for v in (along, tail))
    da = along @ tail
    a = np.maximum(length * (x * x + y * y + 1) - dr * dr, 1e-12)
    b = length * ar - da * dr
    h = b * b - a * (length * (tail @ tail - radius**2) - da * da)
    t = np.where(h >= 0, (b - np.sqrt(np.maximum(h, 0))) / a, np.inf)
    reach = np.where(np.isfinite(t), t, 0.0)
    share = (reach * dr - da) / length
    normal = [(reach * r - tail[k] - share * along[k]) / radius for k, r in enumerate((x, y, 1.0))]
    for end, beyond in ((tail, share <= 0), (head, share >= 1)):
        t_ball, normal_ball = meet_ball(x, y, end, radius)
        t = np.where((h >= 0) & beyond, t_ball, t)
        normal = [
            np.where(beyond, n_ball, n) for n, n_ball in zip(normal, normal_ball, strict=True)
        ]
    return np.where(t > 0, t, np.inf), (normal[0], normal[1], normal[2])


def meet_box(
    x: Ray, y: Ray, centre: Vector, axes: Float[np.ndarray, "3 3"], half: tuple[float, ...]
) -> Meeting:
    """A ray is inside the box where it is inside all three slabs."""
    shape = np.broadcast_shapes(x.shape, y.shape)
    enter, leave = np.zeros(shape), np.full(shape, np.inf)
    normal = [np.zeros(shape) for _ in range(3)]
    for axis, size in zip(axes, half, strict=True):
        speed, offset = axis[0] * x + axis[1] * y + axis[2], axis @ centre
        speed = np.where(np.abs(speed) < 1e-12, 1e-12, speed)
        t0, t1 = (offset - size) / speed, (offset + size) / speed
        later = np.minimum(t0, t1) > enter
        enter = np.where(later, np.minimum(t0, t1), enter)
        leave = np.minimum(leave, np.maximum(t0, t1))
        normal = [
            np.where(later, -np.sign(speed) * a, n) for a, n in zip(axis, normal, strict=True)
        ]
    met = (enter > 0) & (enter <= leave)
    return np.where(met, enter, np.inf), (normal[0], normal[1], normal[2])


def meet(x: Ray, y: Ray, solid: Solid, camera: Camera) -> Meeting:
    tail, head = camera.seen(solid.tail), camera.seen(solid.head)
    if solid.axes is None:
        return meet_capsule(x, y, tail, head, solid.radius)
    return meet_box(x, y, (tail + head) / 2, camera.turned(solid.axes), solid.half)


def draw_solids(picture: Picture, camera: Camera, solids: Sequence[Solid]) -> None:
    depth = np.full(picture.shape[:2], np.inf)
    sky = camera.turned(np.array([0.0, 0.0, 1.0]))
    sun = _unit(np.array([-0.45, 0.15, -0.6]) + 0.75 * sky)
    gleam = _unit(sun + np.array([0.0, 0.0, -1.0]))
    for solid in solids:
        reach = solid.radius if solid.axes is None else math.hypot(*solid.half)
        where = camera.extent(solid.tail, solid.head, reach)
        if where is None:
            continue
        t, (nx, ny, nz) = meet(*camera.rays(*where), solid, camera)
        day, facing, mirror = (nx * v[0] + ny * v[1] + nz * v[2] for v in (sky, sun, gleam))
        light = 0.52 + 0.16 * day + 0.5 * np.maximum(0, facing)
        shine = 70 / 255 * np.maximum(0, mirror) ** 40
        nearer = t < depth[where]
        depth[where][nearer] = t[nearer]
        colour = light[..., None] * np.array(solid.colour) + shine[..., None]
        picture[where][nearer] = np.minimum(1, colour[nearer])


def _unit(vector: Vector) -> Vector:
    return vector / np.linalg.norm(vector)


# --- one picture ------------------------------------------------------------------------------------


class Painter:
    """Draws the moments of an animation."""

    def __init__(self, animation: Animation):
        self.animation = animation
        self.font = ImageFont.load_default(size=13)
        self._still: dict[tuple[float, ...], Picture] = {}  # grounds that do not move, by target

    def picture(self, row: int) -> UInt8[np.ndarray, "height width 3"]:
        """All fields at one step."""
        shown, columns = self.animation, self.animation.columns
        fields = [
            self.field(playback, target, row)
            for playback, target in zip(shown.playbacks, shown.targets, strict=True)
        ]
        empty = np.full_like(fields[0], 255)
        fields += [empty] * (-len(fields) % columns)
        rows = [fields[i : i + columns] for i in range(0, len(fields), columns)]
        return np.concatenate([np.concatenate(fields, axis=1) for fields in rows])

    def field(
        self, playback: Playback, target: Sequence[float], row: int
    ) -> UInt8[np.ndarray, "height width 3"]:
        shown = self.animation
        solids = robot(shown.scene, playback, row)
        if shown.kind == "omni":
            camera, solids = shown.overview, [*solids, *self.pole(target)]
            if tuple(target) not in self._still:
                self._still[tuple(target)] = self.ground(camera, target)
            picture = self._still[tuple(target)].copy()
            self.draw_path(picture, camera, playback.positions[: row + 1, 0])
        else:
            camera = shown.following(playback, row)
            picture = self.ground(camera, None)
        self.draw_shadows(picture, camera, solids)
        draw_solids(picture, camera, solids)
        rays = [picture[i::FINE, j::FINE] for i, j in np.ndindex(FINE, FINE)]
        small = sum(rays[1:], start=rays[0]) / len(rays)
        small[[0, -1]] = small[:, [0, -1]] = 1.0  # a frame around each field
        return self.with_text((255 * small).astype(np.uint8), playback, target, row)

    def ground(self, camera: Camera, target: Sequence[float] | None) -> Picture:
        """Sky, tiles that fade away, and for a place on the ground the space and the target's rings."""
        unit, down = self.animation.unit, np.linspace(0, 1, camera.height)[:, None, None]
        landing = (camera.eye[2] - self.animation.ground) * camera.landing[..., :2]
        place = landing + camera.eye[:2]
        is_ground = np.isfinite(place).all(axis=-1)
        place = np.where(is_ground[..., None], place, 1e9)
        picture = np.where(
            is_ground[..., None], HAZE + down * (FLOOR - HAZE), SKY + down * (HAZE - SKY)
        )
        tile = 10 ** round(math.log10(unit)) * 2 ** max(0, round(math.log2(camera.far / unit / 8)))
        away = np.linalg.norm(place - camera.focus[:2], axis=-1) / (16 * tile)
        dark = np.floor(place / tile).sum(axis=-1) % 2 == 0
        if target is None:  # one lane: tiles that move all over the ground would be most of a GIF
            lane = np.abs(place[..., 1] - camera.focus[1]) < 0.15 * tile
            dark = lane & (np.floor(place[..., 0] / tile) % 2 == 0)
        _blend(picture, TILE, np.where(dark, 0.34 * np.clip(1.6 * (1 - away), 0, 1), 0.0))
        if target is not None:
            low, high = self.animation.bounds
            border = np.minimum(place - low, np.array(high) - place).min(axis=-1)
            _blend(picture, (0.27, 0.35, 0.43), 0.5 * (np.abs(border) < 0.02 * unit))
            far = np.linalg.norm(place - np.array(target), axis=-1) / unit
            for radius, alpha in ((0.9, 0.25), (0.55, 0.4), (0.22, 0.9)):
                _blend(picture, TARGET, alpha * (far < radius))
        return picture.astype(np.float32)

    def pole(self, target: Sequence[float]) -> list[Solid]:
        unit, ground = self.animation.unit, self.animation.ground
        foot, top = np.array([*target, ground]), np.array([*target, ground + 2 * unit])
        return [Solid(foot, top, 0.05 * unit, POLE), Solid(top, top, 0.24 * unit, POLE)]

    def draw_path(self, picture: Picture, camera: Camera, way: Float[np.ndarray, "time 3"]) -> None:
        on_ground = np.column_stack([way[:, :2], np.full(len(way), self.animation.ground)])
        seen = camera.seen(on_ground)
        points = camera.on_screen(seen[seen[:, 2] > 0.02 * self.animation.unit])
        mask = Image.new("L", (camera.width, camera.height))
        if len(points) > 1:
            ImageDraw.Draw(mask).line(points.ravel().tolist(), 255, 3 * FINE, joint="curve")
        _blend(picture, PATH, np.asarray(mask) / 255)

    def draw_shadows(self, picture: Picture, camera: Camera, solids: Sequence[Solid]) -> None:
        """Of all shapes together, as seen from above: overlaps are not darker."""
        beside = np.full(picture.shape[:2], np.inf)  # distance from the nearest axis, in radii
        height = camera.eye[2] - self.animation.ground
        for solid in solids:
            tail, head = (
                np.append(end[:2], self.animation.ground) for end in (solid.tail, solid.head)
            )
            where = camera.extent(tail, head, 1.3 * solid.radius)
            if where is not None:
                place = height * camera.landing[where][..., :2] + camera.eye[:2]
                away = _distance_to_segment(place, tail[:2], head[:2])
                beside[where] = np.minimum(beside[where], away / solid.radius)
        alpha, dark = np.zeros_like(beside), beside < 1.3
        layers = (beside[dark][:, None] < np.array([1.3, 1.1, 0.9, 0.7])).sum(axis=1)
        alpha[dark] = 1 - (1 - 0.11) ** layers
        _blend(picture, (0.10, 0.14, 0.20), alpha)

    def with_text(
        self,
        field: UInt8[np.ndarray, "height width 3"],
        playback: Playback,
        target: Sequence[float],
        row: int,
    ) -> UInt8[np.ndarray, "height width 3"]:
        image = Image.fromarray(field)
        pen = ImageDraw.Draw(image)
        here = playback.descriptor_path[row]
        asked, now = (", ".join(f"{x:.2f}" for x in d) for d in (target, here))
        lines = f"target ({asked})", f"distance {np.linalg.norm(here - np.array(target)):.2f}"
        if self.animation.kind == "uni":
            lines = f"feet on the ground: {asked}", f"so far: {now}"
        outline: dict[str, Any] = {"font": self.font, "stroke_width": 2, "stroke_fill": "white"}
        pen.text((8, 5), lines[0], "#c40d50", **outline)
        pen.text((8, 22), lines[1], "#1c2733", **outline)
        return np.asarray(image)


def _blend(picture: Picture, colour: Any, alpha: Pixels | Bool[np.ndarray, "height width"]) -> None:
    some = alpha > 0
    picture[some] += alpha[some][:, None] * (np.asarray(colour) - picture[some])


def _distance_to_segment(
    points: Float[np.ndarray, "*n 2"], start: Float[np.ndarray, "2"], end: Float[np.ndarray, "2"]
) -> Float[np.ndarray, "*n"]:
    along = end - start
    share = np.clip((points - start) @ along / max(along @ along, 1e-12), 0, 1)
    return np.linalg.norm(points - start - share[..., None] * along, axis=-1)


# --- files ------------------------------------------------------------------------------------------


def shown_rows(animation: Animation, stride: int) -> list[int]:
    """Every so many steps one, and always the last."""
    return [*range(0, animation.steps - 1, stride), animation.steps - 1]


def write_gif(path: Path, animation: Animation) -> None:
    """In real time, over and over, in few colours that are the same in all pictures."""
    stride = max(1, round(GIF_SECONDS / animation.dt))
    painter, rows = Painter(animation), shown_rows(animation, stride)
    sample = np.concatenate([painter.picture(row) for row in rows[:: max(1, len(rows) // 5)]])
    palette = Image.fromarray(_balanced(sample)[None]).quantize(COLOURS)
    frames = [
        Image.fromarray(painter.picture(row)).quantize(palette=palette, dither=Image.Dither.NONE)
        for row in rows
    ]
    durations = [round(1000 * stride * animation.dt)] * (len(frames) - 1)
    durations.append(round(1000 * HOLD_SECONDS))
    with write_safely(path) as file:
        frames[0].save(
            file, "GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0
        )


def _balanced(sample: UInt8[np.ndarray, "height width 3"]) -> UInt8[np.ndarray, "n 3"]:
    """The colours of a picture, frequent ones less often: small robots need colours too."""
    codes = (sample & 0xFC).astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32)
    colours, counts = np.unique(codes, return_counts=True)
    often = np.repeat(colours, np.sqrt(counts).astype(int))
    return np.stack([often >> 16, often >> 8 & 255, often & 255], axis=1).astype(np.uint8)


def require_ffmpeg() -> str:
    found = shutil.which(FFMPEG)
    if found is None:
        raise UserError("a video needs ffmpeg, which is not installed; --gif needs nothing.")
    return found


def write_video(path: Path, animation: Animation) -> None:
    """Every step, in real time."""
    ffmpeg, painter = require_ffmpeg(), Painter(animation)
    height, width, _ = painter.picture(0).shape
    take = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {1 / animation.dt:.6g} -i -"
    make = "-c:v libx264 -crf 20 -pix_fmt yuv420p -movflags +faststart -f mp4"
    with write_safely(path) as file:
        command = [ffmpeg, "-loglevel", "error", "-y", *take.split(), *make.split(), file.name]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdin is not None and process.stderr is not None
        with process.stdin as pipe:
            try:
                for row in range(animation.steps):
                    pipe.write(painter.picture(row).tobytes())
            except BrokenPipeError:
                pass  # ffmpeg has ended; it says why
        said = process.stderr.read().decode(errors="replace").strip()
        if process.wait() != 0:
            reason = said.splitlines()[-1] if said else f"code {process.returncode}"
            raise UserError(f"ffmpeg could not write {path}: {reason}.")
