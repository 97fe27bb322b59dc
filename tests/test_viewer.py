"""The viewer: one page that holds all it needs, says what was reached and plays in a browser."""

import base64
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from machinery import viewer

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
HOSTILE = "</script><script>alert('1')</script>@@DATA@@\"&<!--"


def walk(end: tuple[float, float], steps: int = 40) -> viewer.Playback:
    """A point that goes straight from the origin to `end`."""
    path = np.linspace((0.0, 0.0), end, steps)
    positions = np.concatenate([path, np.zeros((steps, 1))], axis=1)[:, None]
    return viewer.Playback(positions, np.tile([1.0, 0.0, 0.0, 0.0], (steps, 1, 1)), path)


def trot(shares: tuple[float, ...], steps: int = 40) -> viewer.Playback:
    """A point that runs along x on feet that touch the ground in these shares of the steps."""
    still = walk((3.0, 0.0), steps)
    contacts = np.random.default_rng(0).random((steps, len(shares))) < shares
    running = np.cumsum(contacts, axis=0) / np.arange(1, steps + 1)[:, None]
    return viewer.Playback(still.positions, still.rotations, running, contacts)


def point_page(title: str = "point-omni", **options) -> str:
    episodes = [walk((0.5, 0.25)), walk((-0.5, 0.0))]
    return viewer.page(title, viewer.point_scene(), episodes, (0.5, 0.5), (-1, 1), **options)


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def numbers(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4")


@pytest.fixture(scope="module")
def systems() -> dict:
    from brax import envs as brax_envs

    return {name: brax_envs.get_environment(name).sys for name in ("ant", "halfcheetah")}


def test_the_page_needs_nothing_from_the_network():
    page = point_page()
    assert not re.search(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", page, re.IGNORECASE)
    assert not re.search(r"\b(?:import|XMLHttpRequest|WebSocket)\s*\(", page)
    assert set(re.findall(r'(?:src|href)="([^"]*)"', page)) == {"data:,"}
    assert "default-src 'none'" in page and "connect-src" not in page  # the browser would refuse


def test_what_is_recorded_is_what_is_played():
    episode = trot((0.2, 0.7))
    scene = viewer.Scene(viewer.point_scene().geoms, {"back": 0, "front": 0})
    data = data_of(viewer.page("t", scene, [episode], (0.25, 0.5), ((0, 0), (1, 1)), "uni", 0.1))
    assert (data["kind"], data["dt"], data["live"]) == ("uni", 0.1, None)
    assert data["bounds"] == [[0, 0], [1, 1]] and data["feet"] == [["back", 0], ["front", 0]]
    assert data["played"]["target"] == [0.25, 0.5]
    (player,) = data["played"]["players"]
    (played,) = player["episodes"]
    assert (played["steps"], played["bodies"], played["feet"]) == (40, 1, 2)
    for name, array in {
        "positions": episode.positions,
        "rotations": episode.rotations,
        "descriptors": episode.descriptor_path,
        "contacts": episode.contacts,
    }.items():
        np.testing.assert_array_equal(numbers(played[name]), np.asarray(array, np.float32).ravel())


def test_a_hostile_title_stays_text():
    class Scripts(HTMLParser):
        opened = 0

        def handle_starttag(self, tag, attrs):
            self.opened += tag == "script"

    page = point_page(HOSTILE)
    parser = Scripts()
    parser.feed(page)
    assert parser.opened == 2  # the data and the program
    assert data_of(page)["title"] == HOSTILE
    assert "alert('1')" not in page.replace(json.dumps(HOSTILE)[1:-1].replace("<", "\\u003c"), "")


def test_five_episodes_of_an_ant_fit_in_an_attachment(systems):
    steps, links = 250, 9
    turns = np.tile([1.0, 0.0, 0.0, 0.0], (steps, links, 1))
    ant = viewer.Playback(np.ones((steps, links, 3)), turns, np.ones((steps, 2)))
    page = viewer.page(
        "ant-omni", viewer.scene_from_brax(systems["ant"]), [ant] * 5, (1.0, 1.0), (-15, 15)
    )
    assert len(page) < 1_000_000


def test_the_ant_has_a_torso_and_four_legs(systems):
    scene = viewer.scene_from_brax(systems["ant"], feet=(2, 4, 6, 8))
    assert list(scene.feet.values()) == [2, 4, 6, 8]  # links without a name: foot 1, foot 2, ...
    torso = [g for g in scene.geoms if g.body == 0]
    assert [g.shape for g in torso].count("sphere") == 1
    assert {g.body for g in scene.geoms} == {viewer.WORLD, *range(9)}  # upper and lower legs
    assert {g.shape for g in scene.geoms if g.body == viewer.WORLD} == {"plane"}


def test_the_halfcheetahs_feet_are_named(systems):
    scene = viewer.scene_from_brax(systems["halfcheetah"], feet=(3, 6))
    assert scene.feet == {"back foot": 3, "front foot": 6}
    assert all(g.shape == "capsule" for g in scene.geoms if g.body != viewer.WORLD)


def test_a_shape_that_the_page_cannot_draw_becomes_its_bounding_box():
    import mujoco

    model = mujoco.MjModel.from_xml_string(
        '<mujoco><worldbody><body><freejoint/><geom type="ellipsoid" size="1 2 3" rgba="1 0 0 1"/>'
        "</body></worldbody></mujoco>"
    )

    class System:
        mj_model, link_names, link_parents = model, ["egg"], (-1,)

    (egg,) = viewer.scene_from_brax(System()).geoms
    assert (egg.shape, egg.body, egg.colour) == ("box", 0, (1.0, 0.0, 0.0))
    np.testing.assert_allclose(egg.size, (1, 2, 3), atol=1e-3)


def test_an_episode_that_diverged_is_refused_with_its_step():
    broken = walk((1.0, 1.0))
    broken.positions[17:] = np.nan
    with pytest.raises(ValueError, match="Episode 2 diverged at step 17"):
        viewer.page("t", viewer.point_scene(), [walk((1.0, 1.0)), broken], (0.0, 0.0), (-1, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": (np.nan, 0.0)}, "finite"),
        ({"target": (0.0, 0.0, 0.0)}, "x and y"),
        ({"bounds": (1, -1)}, "low < high"),
        ({"playbacks": []}, "no episode"),
        ({"dt": 0.0}, "positive"),
        ({"scene": viewer.Scene([])}, "no geom that moves"),
        (
            {"scene": viewer.Scene([viewer.Geom("sphere", (1.0,), (1.0, 0.0, 0.0), body=3)])},
            "1 bodies",
        ),
    ],
)
def test_an_impossible_request_is_told_in_a_sentence(change, message):
    request = {
        "title": "t",
        "scene": viewer.point_scene(),
        "playbacks": [walk((1.0, 1.0))],
        "target": (0.0, 0.0),
        "bounds": (-1, 1),
    }
    with pytest.raises(ValueError, match=message):
        viewer.page(**(request | change))


# --- in a browser ---------------------------------------------------------------------------------

# The visit gives the page its frames by its own clock: a headless browser does so when it pleases.
CLOCK = """<script>
let nextFrame, now = 0;
window.requestAnimationFrame = frame => { nextFrame = frame; };
</script>"""
# A visitor who tries everything, then notes what the page says.
VISIT = """<script>
const at = id => document.getElementById(id), view = at("view"), seen = new Set(), note = {};
const wait = seconds => { now += 1000 * seconds; nextFrame(now); };
const look = () => { wait(0.05); seen.add(view.toDataURL()); };
const point = (type, x, y) => view.dispatchEvent(
  new PointerEvent(type, {pointerId: 1, clientX: x, clientY: y, bubbles: true}));
view.setPointerCapture = () => {};  // a made-up pointer cannot be captured
look();
point("pointerdown", 100, 100);
point("pointermove", 160, 100); look();
point("pointermove", 160, 130); look();
point("pointerup", 160, 130);
view.dispatchEvent(new WheelEvent("wheel", {deltaY: 300, cancelable: true})); look();
at("camera").click(); look();
at("time").value = 1; at("time").dispatchEvent(new Event("input")); look();
window.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"})); look();
note.pictures = seen.size;
note.stepped = at("time").value;
at("episode").value = 1; at("episode").dispatchEvent(new Event("change"));
at("speed").value = "2"; wait(0.1); note.played = at("time").value;
at("play").click(); wait(0.1); note.paused = at("time").value;
for (const id of ["title", "target", "reached", "distance", "play"]) note[id] = at(id).textContent;
note.lamps = at("lamps").children.length;
document.body.dataset.note = JSON.stringify(note);
</script>"""


def browse(page: str, folder: Path, *options: str) -> tuple[str, str]:
    """Opens a page with the network off; returns what was printed, and the console's errors."""
    if BROWSER is None:
        pytest.skip("no Chromium on this machine: the page was not opened in a browser")
    (folder / "page.html").write_text(page, encoding="utf-8")
    flags = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --enable-logging=stderr --v=0 "
        "--window-size=1000,700 --virtual-time-budget=3000"
    )
    done = subprocess.run(
        [
            BROWSER,
            *flags.split(),
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={folder / 'profile'}",
            *options,
            (folder / "page.html").as_uri() + "#time=1.5",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout, "\n".join(li for li in done.stderr.splitlines() if "CONSOLE" in li)


def test_the_page_plays_in_a_browser_without_network_or_errors(tmp_path):
    page = point_page(HOSTILE, dt=0.1)
    page = page.replace("</head>", CLOCK + "</head>").replace("</body>", VISIT + "</body>")
    page = re.sub(
        "script-src 'sha256-[^']*'", "script-src 'unsafe-inline'", page
    )  # for the visitor
    shown, errors = browse(page, tmp_path, "--dump-dom")
    assert errors == ""
    found = re.search(r'data-note="([^"]*)"', shown)
    assert found is not None, "the visit did not come to its end"
    note = json.loads(html.unescape(found[1]))
    # as it opens, turned, tilted, zoomed, from afar, later, one step on
    assert note["pictures"] == 7
    assert float(note["stepped"]) == pytest.approx(1.1)
    assert float(note["played"]) == pytest.approx(0.2)  # a tenth of a second at double speed
    assert note["paused"] == note["played"]
    assert note["title"] == HOSTILE
    assert (note["lamps"], note["play"]) == (0, "Play")
    assert note["target"] == "(0.50, 0.50)" and note["reached"] == "(−0.50, 0.00)"
    number, unit = note["distance"].split()
    assert float(number) == pytest.approx(np.hypot(1.0, 0.5), abs=1e-3) and unit == "m"


def test_robot_target_and_path_are_in_the_picture(tmp_path):
    from matplotlib.image import imread

    _, errors = browse(point_page(), tmp_path, f"--screenshot={tmp_path / 'picture.png'}")
    assert errors == ""
    stage = imread(tmp_path / "picture.png")[:540, :650, :3]  # without the controls and the panel
    red, green, blue = np.moveaxis(stage, -1, 0)
    assert ((blue > 1.4 * red) & (blue < 0.75)).sum() > 1000  # the ball
    pink = (red > 0.4) & (red > 2 * green)
    assert pink.any(axis=1).sum() > 100  # the target's pole stands upright, its rings lie flat
    assert ((blue > 0.85) & (red < 0.2)).sum() > 100  # the path


@pytest.mark.parametrize("shares", [(0.5,), (0.2, 0.7), (0.1, 0.3, 0.5, 0.7)])
def test_a_lamp_for_every_foot(tmp_path, shares):
    scene = viewer.Scene(viewer.point_scene().geoms, {f"foot {k}": 0 for k in range(len(shares))})
    page = viewer.page("t", scene, [trot(shares)], shares, (0, 1), "uni")
    shown, errors = browse(page, tmp_path, "--dump-dom")
    assert errors == ""
    lamps = re.search(r'<ul id="lamps">(.*?)</ul>', shown)
    assert lamps is not None and lamps[1].count("<li") == len(shares)
    assert f"(target {100 * shares[-1]:.0f} %)" in lamps[1]
