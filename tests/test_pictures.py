"""Pictures without a browser: rays meet shapes where geometry says, and files hold what was played."""

import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_viewer import trot, walk

from machinery import pictures, viewer
from machinery.files import UserError

TARGETS = [(x, y) for y in (0.5, 0.0, -0.5) for x in (-0.5, 0.0, 0.5)]
STRAIGHT = np.zeros((1, 1))  # the ray through the middle of the picture


def animation(targets=TARGETS, steps: int = 21) -> pictures.Animation:
    """Points that go straight to their targets."""
    episodes = [walk(target, steps) for target in targets]
    return pictures.Animation(
        viewer.point_scene(), episodes, targets, ((-1.0, -1.0), (1.0, 1.0)), "omni", 0.1
    )


def is_pink(picture: np.ndarray) -> np.ndarray:
    red, green, _ = np.moveaxis(picture.astype(int), -1, 0)
    return (red > 120) & (red > 2 * green)


def is_blue(picture: np.ndarray) -> np.ndarray:
    red, _, blue = np.moveaxis(picture.astype(int), -1, 0)
    return (blue > 90) & (blue > 1.7 * red)


# --- rays -------------------------------------------------------------------------------------------


def test_a_ray_meets_the_near_side_of_a_ball():
    t, normal = pictures.meet_ball(STRAIGHT, STRAIGHT, np.array([0.0, 0.0, 5.0]), 2.0)
    assert t.item() == pytest.approx(3.0)
    assert [n.item() for n in normal] == pytest.approx([0.0, 0.0, -1.0])
    aside = pictures.meet_ball(STRAIGHT, STRAIGHT, np.array([2.1, 0.0, 5.0]), 2.0)
    behind = pictures.meet_ball(STRAIGHT, STRAIGHT, np.array([0.0, 0.0, -5.0]), 2.0)
    assert np.isinf(aside[0]).all() and np.isinf(behind[0]).all()


@pytest.mark.parametrize(
    ("tail", "head", "expected"),
    [
        ((-1, 0, 5), (1, 0, 5), 4.0),  # across the ray: the cylinder
        ((0, 0, 5), (0, 0, 9), 4.0),  # along the ray: the near end
        ((0.5, 0, 5), (2, 0, 5), 5 - np.sqrt(0.75)),  # beside the ray: the round of an end
        ((1.1, 0, 5), (2, 0, 5), np.inf),
    ],
)
def test_a_ray_meets_a_capsule_at_its_side_or_its_ends(tail, head, expected):
    ends = np.array(tail, float), np.array(head, float)
    t, normal = pictures.meet_capsule(STRAIGHT, STRAIGHT, *ends, 1.0)
    assert t.item() == pytest.approx(expected)
    if np.isfinite(expected):
        assert np.linalg.norm([n.item() for n in normal]) == pytest.approx(1.0)


def test_capsules_are_met_where_many_small_balls_would_be():
    random = np.random.default_rng(0)
    x, y = random.uniform(-0.6, 0.6, (2, 40, 40))
    tail, head = np.array([-1.0, -0.5, 4.0]), np.array([1.5, 1.0, 6.0])
    found, _ = pictures.meet_capsule(x, y, tail, head, 0.5)
    balls = [
        pictures.meet_ball(x, y, tail + s * (head - tail), 0.5)[0] for s in np.linspace(0, 1, 2000)
    ]
    nearest = np.min(balls, axis=0)
    same = np.isfinite(found) == np.isfinite(nearest)
    assert same.mean() > 0.99
    both = np.isfinite(found) & np.isfinite(nearest)
    assert both.sum() > 100
    np.testing.assert_allclose(found[both], nearest[both], atol=0.01)


def test_a_ray_meets_the_face_of_a_box_that_looks_at_it():
    turned = np.array([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    t, normal = pictures.meet_box(
        STRAIGHT, STRAIGHT, np.array([0.0, 0.0, 5.0]), turned, (2.0, 1.0, 1.0)
    )
    assert t.item() == pytest.approx(3.0)
    assert [n.item() for n in normal] == pytest.approx([0.0, 0.0, -1.0])
    beside = pictures.meet_box(
        STRAIGHT, STRAIGHT, np.array([1.1, 0.0, 5.0]), np.eye(3), (1.0, 1.0, 1.0)
    )
    assert np.isinf(beside[0]).all()


def test_the_nearer_of_two_shapes_is_seen_in_whatever_order():
    camera = pictures.Camera(np.zeros(3), 5.0, 0.0, 80, 60)
    near, far = (
        pictures.Solid(np.array([0.0, y, 0.0]), np.array([0.0, y, 0.0]), 0.5, colour)
        for y, colour in ((-1.0, (1.0, 0.0, 0.0)), (1.0, (0.0, 0.0, 1.0)))
    )
    for order in ([near, far], [far, near]):
        picture = np.zeros((60, 80, 3))
        pictures.draw_solids(picture, camera, order)
        red, _, blue = picture[30, 40]
        assert red > blue


# --- pictures ---------------------------------------------------------------------------------------


def test_robot_target_and_path_are_in_the_picture():
    shown = animation([(0.5, 0.5)])
    painter = pictures.Painter(shown)
    first, last = painter.picture(0), painter.picture(20)
    assert first.shape == last.shape == (360, 480, 3)
    assert is_pink(first[40:]).sum() > 300  # the pole and its rings, below the text
    assert is_blue(first).sum() > 100  # the ball
    assert is_blue(last).sum() > is_blue(first).sum() + 300  # and the path behind it


def test_every_robot_goes_where_its_target_stands():
    """All fields are seen from the same place: x to the right, y away."""
    picture = pictures.Painter(animation()).picture(20)
    assert picture.shape == (3 * 180, 3 * 240, 3)
    fields = picture.reshape(3, 180, 3, 240, 3).transpose(0, 2, 1, 3, 4).reshape(9, 180, 240, 3)
    places = [np.argwhere(is_pink(field[42:])).mean(axis=0) for field in fields]
    rows, columns = np.array(places).reshape(3, 3, 2).transpose(2, 0, 1)
    assert (np.diff(columns, axis=1) > 10).all()  # further to the right
    assert (np.diff(rows, axis=0) > 5).all()  # and nearer to the eye


def test_a_foot_on_the_ground_lights_up():
    episode = trot((0.5,))
    scene = viewer.Scene(viewer.point_scene(0.2).geoms, {"foot": 0})
    shown = pictures.Animation(scene, [episode], [(0.5,)], ((0.0,), (1.0,)), "uni", 0.05)
    painter = pictures.Painter(shown)
    assert episode.contacts is not None
    for row in (int(episode.contacts.argmax()), int(episode.contacts.argmin())):
        red, green, blue = np.moveaxis(painter.picture(row).astype(int), -1, 0)
        assert bool(((green > 2 * red) & (green > 1.5 * blue)).sum() > 50) == bool(
            episode.contacts[row, 0]
        )


def test_behind_a_runner_only_its_lane_moves():
    """A ground that moves all over the picture would be most of a GIF."""
    episode = walk((0.5, 0.0))
    shown = pictures.Animation(
        viewer.point_scene(0.2), [episode], [(0.5, 0.5)], ((0.0,) * 2, (1.0,) * 2), "uni", 0.05
    )
    painter = pictures.Painter(shown)
    first, last = (painter.picture(row)[60:].astype(int) for row in (0, len(episode.positions) - 1))
    changed = np.abs(first - last).max(axis=(1, 2)) > 2
    assert changed.any() and changed.mean() < 0.5
    assert not changed[-20:].any()  # in front of the lane


def test_an_episode_that_diverged_is_refused_with_its_step():
    broken = walk((0.5, 0.5))
    broken.positions[17:] = np.nan
    with pytest.raises(ValueError, match="Episode 1 diverged at step 17"):
        pictures.Animation(
            viewer.point_scene(), [broken], [(0.5, 0.5)], ((-1.0, -1.0), (1.0, 1.0)), "omni", 0.1
        )


# --- files ------------------------------------------------------------------------------------------


def test_nine_targets_are_a_gif_of_a_few_hundred_kilobytes(tmp_path):
    path = tmp_path / "nine.gif"
    began = time.monotonic()
    pictures.write_gif(path, animation())
    print(f"{path.stat().st_size:,} bytes in {time.monotonic() - began:.1f} s")
    assert path.stat().st_size < 400_000
    with Image.open(path) as gif:
        assert gif.size == (720, 540) and gif.info["loop"] == 0
        assert gif.n_frames == 21  # every step of a tenth of a second
        durations = []
        for i in range(gif.n_frames):
            gif.seek(i)
            durations.append(gif.info["duration"])
    assert durations[:-1] == [100] * 20 and durations[-1] == 1000  # the end stays


@pytest.mark.skipif(shutil.which("ffprobe") is None, reason="no ffmpeg on this machine")
def test_a_video_has_every_step_in_real_time(tmp_path):
    path = tmp_path / "two.mp4"
    pictures.write_video(path, animation([(0.5, 0.5), (-0.5, 0.5)], steps=11))
    asked = "-v error -count_frames -show_entries stream=width,height,nb_read_frames,r_frame_rate"
    told = subprocess.run(
        ["ffprobe", *asked.split(), "-of", "csv=p=0", str(path)], capture_output=True, text=True
    )
    assert told.stdout.strip() == "640,240,10/1,11"


def test_without_ffmpeg_a_video_is_refused_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "FFMPEG", "no-such-program")
    with pytest.raises(UserError, match="needs ffmpeg, which is not installed"):
        pictures.write_video(tmp_path / "x.mp4", animation([(0.5, 0.5)]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="no ffmpeg on this machine")
def test_a_video_that_ffmpeg_cannot_write_leaves_nothing(tmp_path, monkeypatch):
    failing = tmp_path / "ffmpeg"
    failing.write_text("#!/bin/sh\necho no codec >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(pictures, "FFMPEG", str(failing))
    with pytest.raises(UserError, match="no codec"):
        pictures.write_video(tmp_path / "x.mp4", animation([(0.5, 0.5)], steps=3))
    assert [path.name for path in Path(tmp_path).iterdir()] == ["ffmpeg"]
