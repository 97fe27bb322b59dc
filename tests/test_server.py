"""The server: what it plays and what it refuses, in the test client, over the network and in a browser."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageSequence
from test_viewer import data_of, walk
from webdriver import CHROMEDRIVER, CHROMIUM, Browser

import cli
from evaluate import Filming
from machinery import demand, server, viewer
from machinery.demand import PARTS, Cast
from machinery.files import UserError, save_arrays, write_json
from machinery.runs import open_stage
from machinery.server import Refused, Space, Wish, Worker
from machinery.streams import stream
from qdt import make_model, play

ROOT = Path(__file__).parents[1]
SPACE = Space((-1.0, -1.0), (1.0, 1.0), ["model", "repertoire"], parts=5)
WISH = {"targets": [[0.5, -0.25]], "players": ["model"], "seed": 0, "noise": False}
SCENE = viewer.point_scene()
PLAYERS = {"model": "QDT", "repertoire": "nearest policy"}
ACCURACY = viewer.Accuracy(
    np.array([[-0.5, 0.0], [0.5, 0.0]]), {name: np.array([0.1, np.nan]) for name in PLAYERS}
)


def walks(wish: Wish) -> dict:
    """Two starts of everybody who is asked; the nearest policy does not quite get there."""
    share, target = {"model": 1.0, "repertoire": 0.8}, wish.targets[-1]
    films = {
        name: [walk((share[name] * target[0], share[name] * target[1]))] * 2
        for name in wish.players
    }
    return viewer.pack(SCENE, films, target)


def make_page() -> str:
    live = viewer.Live(PLAYERS, 0, 0.05, SPACE.parts, ACCURACY)
    return viewer.page("t", SCENE, [walk((0.0, 0.0))] * 2, (0.0, 0.0), (-1, 1), dt=0.05, live=live)


@contextmanager
def serving(play: Callable[[Wish], dict]) -> Iterator[int]:
    """A real server in a thread; its port."""
    with server.reserve("127.0.0.1", 0) as reserved, Worker() as worker:
        port = reserved.getsockname()[1]
        policy, own = viewer.security_policy(live=True), server.own_names("127.0.0.1", port)
        app = server.make_app(make_page(), policy, SPACE, play, worker, own)
        running = server.make_http_server(app, reserved)
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield port
        finally:
            running.shutdown()
            thread.join()


def ask(port: int, wish: dict | bytes | Iterator[bytes] = WISH) -> tuple[int, str]:
    body = json.dumps(wish).encode() if isinstance(wish, dict) else wish
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/play", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture
def client():
    with Worker() as worker:
        own = server.own_names("127.0.0.1", 8000)
        app = server.make_app(make_page(), "default-src 'none'", SPACE, walks, worker, own)
        yield app.test_client()


def post(client, content=WISH, host: str = "127.0.0.1:8000", **headers: str):
    named = {k.replace("_", "-"): v for k, v in headers.items()}
    return client.post("/play", json=content, base_url=f"http://{host}", headers=named)


# --- what is answered -------------------------------------------------------------------------------


def test_the_page_and_the_play_request_and_nothing_else(client):
    page = client.get("/", base_url="http://127.0.0.1:8000")
    assert page.status_code == 200 and page.mimetype == "text/html"
    assert data_of(page.text)["live"]["players"] == [list(item) for item in PLAYERS.items()]
    for path in (
        "/viewer.js",
        "/play",
        "/../cli.py",
        "/static/x",
        "/favicon.ico",
        "/%2e%2e/",
    ):
        assert client.get(path, base_url="http://127.0.0.1:8000").status_code in (404, 405)
    for method in ("put", "delete", "options", "patch", "trace"):
        found = getattr(client, method)("/", base_url="http://127.0.0.1:8000")
        assert found.status_code == 405


def test_a_wish_is_played_as_it_was_asked_for(client):
    answer = post(client, WISH | {"players": ["repertoire", "model"]})
    assert answer.status_code == 200
    assert answer.json["target"] == [0.5, -0.25]
    assert [player["name"] for player in answer.json["players"]] == ["repertoire", "model"]
    assert [len(player["episodes"]) for player in answer.json["players"]] == [2, 2]


def test_every_answer_has_a_strict_policy(client):
    for answer in (
        client.get("/", base_url="http://localhost:8000"),
        post(client),
        post(client, 1),
    ):
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in answer.headers


def test_the_policy_of_the_page_allows_its_own_script_by_checksum():
    policy = viewer.security_policy(live=True)
    assert "unsafe" not in policy and policy in make_page()
    assert "connect-src 'self'" in policy
    assert "connect-src" not in viewer.security_policy(live=False)


# --- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["evil.example:8000", "127.0.0.1:8001", "127.0.0.1", "", "[::2]:8000"]
)
def test_another_host_is_refused(client, host):
    """Such as a name of somebody else's that was pointed at this machine."""
    for answer in (
        client.get("/", headers={"Host": host}),
        client.post("/play", json=WISH, headers={"Host": host}),
    ):
        assert answer.status_code == 403


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost:8000", "LOCALHOST:8000", "[::1]:8000"]
)
def test_the_machines_names_for_itself_are_its_own(client, host):
    assert post(client, host=host).status_code == 200


def test_on_all_addresses_a_plain_address_is_its_own_but_no_strange_name():
    own = server.own_names("0.0.0.0", 80)
    assert own("192.168.1.7") and own("192.168.1.7:80") and own(socket.gethostname())
    assert not own("evil.example") and not own("192.168.1.7:8000")


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "http://127.0.0.1:8001",
        "https://127.0.0.1:8000",
        "http://localhost:8000",  # another origin than the one that is asked
        "null",
        "",
    ],
)
def test_a_page_of_another_origin_is_refused(client, origin):
    assert post(client, Origin=origin).status_code == 403


def test_the_own_page_and_a_program_without_origin_may_ask(client):
    assert post(client, Origin="http://127.0.0.1:8000").status_code == 200
    assert post(client).status_code == 200


def test_a_form_cannot_ask(client):
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        answer = client.post(
            "/play", data=json.dumps(WISH), content_type=kind, base_url="http://127.0.0.1:8000"
        )
        assert answer.status_code == 415


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"targets": [[0.5]]}, "2 numbers"),
        ({"targets": [[0.5, 0.5, 0.5]]}, "2 numbers"),
        ({"targets": ["0.5 0.5"]}, "2 numbers"),
        ({"targets": [["0.5", 0.5]]}, "finite"),
        ({"targets": [[True, 0.5]]}, "finite"),
        ({"targets": [[None, 0.5]]}, "finite"),
        ({"targets": [[float("nan"), 0.5]]}, "finite"),
        ({"targets": [[float("inf"), 0.5]]}, "finite"),
        ({"targets": [[10**400, 0.5]]}, "finite"),
        ({"targets": [[1.01, 0.5]]}, "1.01 lies outside the space, which goes from -1 to 1"),
        ({"targets": [0.5, 0.5]}, "2 numbers"),
        ({"targets": []}, "1 to 5"),
        ({"targets": [[0.5, 0.5]] * 6}, "1 to 5"),
        ({"targets": None}, "1 to 5"),
        ({"targets": [[0.5, 0.5], [0.5, 2.0]]}, "2 lies outside the space"),
        ({"players": []}, "model, repertoire"),
        ({"players": ["model", "model"]}, "model, repertoire"),
        ({"players": ["oracle"]}, "model, repertoire"),
        ({"players": [["model"]]}, "model, repertoire"),
        ({"players": "model"}, "model, repertoire"),
        ({"seed": -1}, "whole number"),
        ({"seed": 2**31}, "whole number"),
        ({"seed": 1.5}, "whole number"),
        ({"seed": True}, "whole number"),
        ({"noise": 1}, "true or false"),
        ({"more": 1}, "fields"),
    ],
)
def test_a_wrong_wish_is_told_in_a_sentence(client, change, sentence):
    answer = post(client, WISH | change)
    assert answer.status_code == 400
    assert sentence in answer.text and "\n" not in answer.text and answer.mimetype == "text/plain"


@pytest.mark.parametrize(
    "body", [b"", b"hello", b"[" * 4000, b"\xff\xfe", b"[]", b"null", b"1e999"]
)
def test_what_is_no_wish_at_all_is_refused(client, body):
    answer = client.post(
        "/play", data=body, content_type="application/json", base_url="http://127.0.0.1:8000"
    )
    assert answer.status_code == 400


def test_what_goes_wrong_while_playing_is_told_and_the_next_one_is_played(capsys):
    def play(wish: Wish) -> dict:
        if wish.seed == 1:
            raise UserError("Episode 1 diverged at step 17.")
        if wish.seed == 2:
            raise ZeroDivisionError
        return walks(wish)

    with serving(play) as port:
        assert ask(port, WISH | {"seed": 1}) == (422, "Episode 1 diverged at step 17.")
        status, sentence = ask(port, WISH | {"seed": 2})
        assert status == 500 and "terminal" in sentence
        assert ask(port)[0] == 200
    assert "ZeroDivisionError" in capsys.readouterr().err


# --- over the network -------------------------------------------------------------------------------


def test_ten_megabytes_are_refused_with_an_answer():
    with serving(walks) as port:
        assert ask(port, b" " * 10_000_000)[0] == 413
        assert ask(port, (b" " * 100_000 for _ in range(100)))[0] in (400, 413)  # in chunks
        assert ask(port)[0] == 200


def test_of_a_hundred_requests_at_once_each_is_played_or_told_to_come_again():
    played = []

    def play(wish: Wish) -> dict:
        time.sleep(0.02)
        played.append(wish.seed)
        return walks(wish)

    with serving(play) as port, ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(lambda seed: ask(port, WISH | {"seed": seed}), range(100)))
        statuses = [status for status, _ in answers]
        assert set(statuses) == {200, 503}
        assert sorted(played) == [seed for seed, status in enumerate(statuses) if status == 200]
        assert all("ask again" in text for status, text in answers if status == 503)
        assert ask(port)[0] == 200  # and after it, all is as before


def test_jobs_are_done_in_the_order_in_which_they_came_by_one_thread():
    done, threads = [], set()

    def job(number: int) -> None:
        done.append(number)
        threads.add(threading.get_ident())

    with Worker(waiting=50) as worker:
        futures = [worker.submit(lambda n=n: job(n)) for n in range(50)]
        for future in futures:
            future.result(10)
    assert done == list(range(50))
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_who_waits_when_the_server_ends_is_told():
    busy = threading.Event()
    with Worker() as worker:
        running = worker.submit(lambda: busy.wait(0.2))
        time.sleep(0.05)
        waiting = worker.submit(lambda: None)
    assert running.result() is False  # finished
    with pytest.raises(Refused, match="about to end"):
        waiting.result()
    with pytest.raises(Refused, match="about to end"):
        worker.submit(lambda: None)


def test_two_windows_get_each_their_own():
    with serving(walks) as port, ThreadPoolExecutor(2) as pool:

        def window(x: float) -> set[float]:
            wish = WISH | {"targets": [[x, 0.0]]}
            return {json.loads(ask(port, wish)[1])["target"][0] for _ in range(20)}

        assert list(pool.map(window, (0.25, 0.75))) == [{0.25}, {0.75}]


def test_a_browser_that_goes_away_leaves_no_trace(capfd):
    with serving(lambda wish: time.sleep(0.1) or walks(wish)) as port:
        for _ in range(3):
            gone = socket.create_connection(("127.0.0.1", port))
            body = json.dumps(WISH)
            gone.sendall(
                f"POST /play HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            gone.close()  # with a reset
        assert ask(port)[0] == 200
    assert capfd.readouterr().err == ""


def test_a_port_in_use_is_told_in_a_sentence():
    with server.reserve("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError, match=f"port {port}: address already in use; --host and --port"
        ):
            server.reserve("127.0.0.1", port)
    with pytest.raises(UserError, match="cannot serve on nowhere:"):
        server.reserve("nowhere", 8000)


# --- the command ------------------------------------------------------------------------------------

SMALL = ["task.length=20", "search.steps=12800", "search.cells=16", "train.width=16"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> cli.Run:
    """A run with a small repertoire, and a QDT that has learned nothing but plays."""
    changes = cli.changes_of(SMALL, cli.STAGES)
    plan = cli.PLANS.asked(cli.Asked("tiny", None, None, "me-ls", None, changes))
    made = cli.do_search(tmp_path_factory.mktemp("served") / "run", plan)
    model = make_model(made.task, plan.train, key=jax.random.key(0))
    model = eqx.tree_at(lambda m: m.statistics.action_noise, model, jnp.array(0.05))
    model = eqx.tree_at(lambda m: m.head.weight, model, replace_fn=lambda w: 50 * w)
    with open_stage(made.directory / "qdt", {"train": plan.train}):
        save_arrays(made.directory / "qdt" / "model.safetensors", model)
    return made


@pytest.fixture(scope="module")
def cast(run) -> Cast:
    return cli.cast_of(run, starts=2)


def test_the_cast_plays_what_act_plays(run, cast):
    assert cast.noise == pytest.approx(0.05)
    keys = jax.random.split(stream(7, "act"), (1, 2))
    targets = jnp.array([[0.5, -0.5]])
    expected = play(run.task, run.model(), targets, keys, Filming(run.task))
    found = cast.film("model", [(0.5, -0.5)] * PARTS, 7, cast.noise)
    assert len(found) == 2
    for episode, path in zip(found, expected.recorded.path[0], strict=True):
        np.testing.assert_allclose(episode.descriptor_path, path, atol=1e-5)


def test_both_players_start_from_the_same_state_and_noise_matters(cast):
    quiet = [cast.film(name, [(0.5, 0.5)] * PARTS, 1, 0.0) for name in cast.titles]
    for ours, theirs in zip(*quiet, strict=True):
        np.testing.assert_array_equal(ours.positions[0], theirs.positions[0])
        assert not np.allclose(ours.positions[-1], theirs.positions[-1])
    noisy, _ = cast.film("model", [(0.5, 0.5)] * PARTS, 1, cast.noise)
    assert not np.allclose(noisy.positions[-1], quiet[0][0].positions[-1])


@pytest.mark.parametrize("who", ["model", "repertoire"])
def test_another_target_on_the_way_changes_what_comes_after_it(run, cast, who):
    stay, turn = [(1.0, 1.0)] * PARTS, [(1.0, 1.0)] * 10 + [(-1.0, -1.0)] * (PARTS - 10)
    (before, _), (after, _) = (cast.film(who, targets, 3, 0.0) for targets in (stay, turn))
    fork = -(-10 * run.task.length // PARTS)  # the first step that knows of the other target
    np.testing.assert_array_equal(before.positions[: fork + 1], after.positions[: fork + 1])
    assert not np.allclose(before.positions[-1], after.positions[-1])


def test_the_map_has_colours_after_the_evaluation_only(run):
    assert demand.accuracy_map(run) is None
    goals = np.zeros((run.task.zones, 2))
    measured = {"goals": goals, "distance": np.full(len(goals), np.nan)}
    result = {"repertoire": measured, "qdt": measured}
    write_json(run.result_path("accuracy"), {"inputs": run.inputs("accuracy"), "result": result})
    accuracy = demand.accuracy_map(run)
    assert accuracy is not None and set(accuracy.distance) == {"model", "repertoire"}
    assert accuracy.goals.shape == (run.task.zones, 2)


def test_several_targets_are_one_animation(run, tmp_path, capsys):
    for i, asked in enumerate([["0.5 0.5", "-1 0"], ["0.5 0.5"]]):
        picture = tmp_path / f"{i}.gif"
        cli.act(run.directory, asked, episodes=2, gif=picture)
        told = capsys.readouterr().out.splitlines()
        assert [line for line in told if line.startswith("target")] == (
            ["target 0.5 0.5", "target -1 0"] if len(asked) > 1 else []
        )
        assert sum("mean distance" in line for line in told) == len(asked)
        assert told[-1] == f"{picture} plays the first start towards each target."
        assert picture.read_bytes().startswith(b"GIF89a")
    cli.act(run.directory, ["0.5 0.5"], episodes=1, gif=tmp_path / "short.gif", seconds=0.5)
    films = (Image.open(tmp_path / name) for name in ("short.gif", "1.gif"))
    frames = [len(list(ImageSequence.Iterator(film))) for film in films]
    assert 1 < frames[0] < frames[1]
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match=f"more than 0, not {wrong:g}"):
            cli.act(run.directory, ["0.5 0.5"], gif=tmp_path / "none.gif", seconds=wrong)
    with pytest.raises(UserError, match="a page shows one target"):
        cli.act(run.directory, ["0 0", "1 1"], html=tmp_path / "page.html")


# The shell behind the tests may have switched Ctrl-C off.
COMMAND = "import signal, cli; signal.signal(signal.SIGINT, signal.default_int_handler); cli.main()"


@contextmanager
def command(run: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    """`qdt serve`, ready; the process and its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = ["serve", str(run), "--port", str(port), "--starts", "2"]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if "Open http" in line:
                break
        else:
            raise AssertionError("".join(said))
        yield process, f"http://127.0.0.1:{port}/"
    finally:
        process.kill()
        process.wait()


def test_the_command_serves_until_it_is_interrupted(run, run_python):
    with command(run.directory) as (process, url):
        port = int(url.rstrip("/").rpartition(":")[2])
        status, text = ask(port, WISH | {"players": ["model", "repertoire"], "noise": True})
        assert status == 200
        assert [len(p["episodes"]) for p in json.loads(text)["players"]] == [2, 2]
        again = run_python(COMMAND, "serve", run.directory, "--port", port, check=False)
        assert again.returncode == 1 and "address already in use" in again.stderr
        assert len(again.stderr.splitlines()) == 1
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=30)
        assert rest == "Ended.\n" and process.returncode == 0


def test_a_run_without_a_model_is_told_in_a_sentence(run, tmp_path, run_python):
    shutil.copytree(run.directory, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "qdt")
    told = run_python(COMMAND, "serve", tmp_path / "run", check=False)
    assert told.returncode == 1
    assert "has no trained qdt; `qdt train` makes one." in told.stderr
    assert len(told.stderr.splitlines()) == 1


# --- in a browser -----------------------------------------------------------------------------------

# From a click on the map to the frame in which the robot of the new target has moved.
CLICK_AND_WATCH = """
const [x, y, done] = arguments, at = id => document.getElementById(id), before = at("target").textContent;
const box = at("chart").getBoundingClientRect(), start = performance.now();
at("chart").dispatchEvent(new MouseEvent("click", {bubbles: true,
  clientX: box.left + x * box.width, clientY: box.top + y * box.height}));
const look = () => at("target").textContent !== before && Number(at("time").value) > 0
  ? done(performance.now() - start) : requestAnimationFrame(look);
look();
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    if not (CHROMIUM and CHROMEDRIVER):
        pytest.skip("no Chromium with chromedriver on this machine: the page was not opened")
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def served(run) -> Iterator[str]:
    """The address of `qdt serve`."""
    with command(run.directory) as (_, url):
        yield url


def visit(browser: Browser, url: str) -> None:
    browser.resize(1280, 800)
    browser.console(), browser.requests()
    browser.open(url)
    browser.wait_for(lambda: "Click on the map" in browser.text("#status"))


def wait_for_answer(browser: Browser) -> None:
    browser.wait_for(lambda: "played in" in browser.text("#status"))


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.replace("−", "-").strip("()").split(",")]


def test_a_click_on_the_map_is_played(browser, served):
    visit(browser, served)
    before = browser.text("#target")
    browser.click("#chart", 0.8, 0.2)
    wait_for_answer(browser)
    browser.wait_for(lambda: browser.run("return Number(time.value) > 0"))
    x, y = numbers(browser.text("#target"))
    assert browser.text("#target") != before and x > 0.3 and y > 0.3
    far, unit = browser.text("#distance").split()
    assert float(far) > 0 and unit == "m"
    assert f"distance {float(far):.2f} m, mean of 2 starts" in browser.text("#status")
    browser.wait_for(lambda: browser.text("#play") == "Replay")
    assert browser.console() == []
    assert set(browser.requests()) == {served, served + "play"}


def test_twenty_clicks_in_a_row_each_move_the_robot(browser, served):
    visit(browser, served)
    places = np.random.default_rng(0).uniform(0.2, 0.8, (20, 2)).tolist()
    times = [browser.run_async(CLICK_AND_WATCH, *place) for place in places]
    assert statistics.median(times) < 2000
    assert browser.console() == []


def test_a_click_on_the_ground_asks_for_that_place(browser):
    with serving(walks) as port:
        visit(browser, f"http://127.0.0.1:{port}/")
        browser.click("#camera")  # from above: all of the space is in the picture
        browser.click("#view", 0.55, 0.5)
        wait_for_answer(browser)
        east = numbers(browser.text("#target"))
        browser.click("#view", 0.5, 0.55)
        browser.wait_for(lambda: numbers(browser.text("#target")) != east)
        south = numbers(browser.text("#target"))
        assert east[0] > 0.05 > abs(east[1]) and south[1] < -0.05 < -abs(south[0])
        assert browser.console() == []


def test_of_many_clicks_while_one_is_playing_the_last_one_counts(browser):
    asked = []

    def play(wish: Wish) -> dict:
        asked.append(wish.targets[-1])
        time.sleep(0.3)
        return walks(wish)

    with serving(play) as port:
        visit(browser, f"http://127.0.0.1:{port}/")
        for x in np.linspace(0.3, 0.9, 20):
            browser.click("#chart", float(x), 0.4)
        browser.wait_for(lambda: numbers(browser.text("#target"))[0] > 0.8)
        wait_for_answer(browser)
        assert len(asked) < 20 and max(asked) == asked[-1]
        assert browser.console() == []


def test_the_map_stays_where_it_is_while_sentences_above_it_change(browser):
    """Or a second click would ask for another place than the first one."""
    with serving(lambda wish: time.sleep(0.3) or walks(wish)) as port:
        for width in (1280, 400):
            visit(browser, f"http://127.0.0.1:{port}/")
            browser.resize(width, 800)
            browser.wait_for(lambda width=width: browser.run("return innerWidth") == width)
            browser.run("who.value = 'model+repertoire'")  # the longest sentence
            top = "return chart.getBoundingClientRect().top + scrollY"
            places = [browser.run(top)]
            browser.click("#chart", 0.7, 0.4)
            browser.wait_for(lambda: "Asking" in browser.text("#status"))
            places.append(browser.run(top))
            wait_for_answer(browser)
            places.append(browser.run(top))
            assert len(set(places)) == 1
        assert browser.console() == []


def test_two_windows_do_not_disturb_each_other(browser):
    with serving(walks) as port:
        visit(browser, f"http://127.0.0.1:{port}/")
        first, second = browser.window(), browser.new_window()
        browser.switch_to(second)
        visit(browser, f"http://127.0.0.1:{port}/")
        browser.click("#chart", 0.9, 0.4)
        wait_for_answer(browser)
        right = browser.text("#target")
        browser.switch_to(first)
        browser.click("#chart", 0.3, 0.4)
        wait_for_answer(browser)
        assert numbers(browser.text("#target"))[0] < 0 < numbers(right)[0]
        browser.switch_to(second)
        assert browser.text("#target") == right
        browser.close_window()
        browser.switch_to(first)
        assert browser.console() == []


def test_while_it_plays_the_target_follows_the_mouse(browser):
    """The way so far stays, the clock goes on, and what is asked for grows by the newest target."""
    asked: list[Wish] = []

    def play(wish: Wish) -> dict:
        asked.append(wish)
        return walks(wish)

    move = """const box = chart.getBoundingClientRect();
    chart.dispatchEvent(new PointerEvent("pointermove", {bubbles: true,
      clientX: box.left + arguments[0] * box.width, clientY: box.top + 0.4 * box.height}));"""
    with serving(play) as port:
        visit(browser, f"http://127.0.0.1:{port}/")
        browser.run("speed.value = '0.25'")  # eight seconds
        browser.click("#chart", 0.8, 0.4)
        wait_for_answer(browser)
        browser.run(move, 0.3)
        browser.click("#follow")  # not before: on its way to the click, the pointer moves, too
        browser.wait_for(lambda: browser.run("return Number(time.value) > 0.1"))
        browser.run(move, 0.4)
        browser.wait_for(lambda: numbers(browser.text("#target"))[0] < 0)
        assert browser.run("return Number(time.value)") > 0.1
        first, second = asked  # without the mark in its box, the mouse asks for nothing
        assert len(first.targets) == 1 and 2 <= len(second.targets) <= SPACE.parts
        assert set(second.targets[:-1]) == set(first.targets) != {second.targets[-1]}
        assert browser.console() == []


def test_both_players_side_by_side_with_ghosts_noise_and_another_seed(browser):
    asked: list[Wish] = []

    def play(wish: Wish) -> dict:
        asked.append(wish)
        return walks(wish)

    change = "const e = document.querySelector(arguments[0]); {} e.dispatchEvent(" + (
        "new Event('change', {bubbles: true}))"
    )
    with serving(play) as port:
        visit(browser, f"http://127.0.0.1:{port}/")
        browser.click("#chart", 0.8, 0.4)
        wait_for_answer(browser)
        browser.run(change.replace("{}", "e.value = 'model+repertoire';"), "#who")
        browser.wait_for(lambda: " and " in browser.text("#status"))
        browser.click("#ghosts")
        browser.run(change.replace("{}", "e.value = 5;"), "#seed")
        browser.wait_for(lambda: asked[-1].seed == 5)
        browser.click("#noise")
        browser.wait_for(lambda: not asked[-1].noise)
        assert asked[0].noise and asked[-1].players == ("model", "repertoire")
        assert len({wish.targets for wish in asked}) == 1
        browser.run(
            change.replace("{}", "e.value = -5;"), "#seed"
        )  # the page does not ask for that
        assert asked[-1].seed == 5
        assert browser.console() == []


def test_a_narrow_window_has_everything_one_below_the_other(browser):
    with serving(walks) as port:
        visit(browser, f"http://127.0.0.1:{port}/")
        browser.resize(500, 900)
        browser.wait_for(lambda: browser.run("return innerWidth < 600"))
        browser.click("#chart", 0.7, 0.4)
        wait_for_answer(browser)
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
        assert browser.run("return chart.getBoundingClientRect().top >= view.clientHeight")
        assert browser.console() == []


def test_a_server_that_ended_is_told_on_the_page(browser):
    with serving(walks) as port:
        visit(browser, f"http://127.0.0.1:{port}/")
    browser.click("#chart", 0.7, 0.4)
    # Or, through a connection that the browser opened before, that it is about to end.
    told = re.compile("does not answer|about to end")
    browser.wait_for(lambda: told.search(browser.text("#status")))
