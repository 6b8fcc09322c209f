"""The page in a real Chromium: every view of runs in every state, at two widths, light and dark.

Each view must be free of console errors, of serious findings of axe, of requests to elsewhere and of sideways
scrolling; what a run recorded is shown, and never run as a script.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from urllib.parse import quote, urlsplit

import pytest

from asyncrl.cli.page import _redirect
from asyncrl.telemetry import RunDirectory, Timeline
from asyncrl.trainer.report import Doing, RunStatus, Waiting, write_status

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[dev]'")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe: pip install -e '.[dev]'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"),
]

HOSTILE = "<img src=x onerror='window.attacked=1'><script>window.attacked=1</script></pre>\u202e\x07\"'&amp;"
STEPS = 30
VIEWS = ("overview", "timeline", "staleness", "weights", "rollouts", "rollouts/0", "failures")
SIZES = ((1440, 900), (390, 844))
CAUSES = {"update": 40.0, "rollouts": 45.0, "publication": 15.0}
ADVICE = {
    "cause": "rollout",
    "sentence": f"the bottleneck is {HOSTILE}; raise rollout.replicas (now 1)",
    "figure": 45.0,
}
TABLES = 'steps = 30\nmax_staleness = 2\n[model]\nsource = "scratch"\n[env]\nname = "calculator"\n'


class Clock:
    """Gives the seconds that it is set to."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


def metrics(step):
    values = {"reward_mean": step / STEPS, "length_mean": 20.0 + step, "tokens_per_s": 900.0, "staleness/1": 40}
    values |= {"staleness_mean": 1.0, "staleness_max": 1, "masked_tokens": 2, "dropped_tokens": 0, "length_ratio": 1.0}
    values |= {"groups_ready": step % 4, "groups_pending": 2, "groups_without_signal": 0.25}
    names = (
        "loss",
        "grad_norm",
        "lr",
        "entropy",
        "policy_kl",
        "behaviour_kl",
        "clip_fraction",
        "effective_sample_share",
    )
    return values | {f"train/{name}": 0.1 + step / 100 for name in names}


def trajectory(step):
    tokens = [["<|user|>"], ["2+2"], ["<|assistant|>"], [HOSTILE, -0.2, step], ["4", -2.5, step + 1]]
    about = {"task": {"prompt": [{"role": "user", "content": HOSTILE}], "ground_truth": "4"}, "finish": "stop"}
    text = f"<|user|>2+2<|assistant|>{HOSTILE}4"
    parts = {HOSTILE: 0.5, "math": 0.5}
    more = {"text": text, "tokens": tokens, "reward": step / STEPS, "reward_parts": parts, "weight_versions": [step]}
    return about | more


def summary():
    causes = {f"ValueError: {HOSTILE}": {"count": 3, "example": f"Traceback (most recent call last)\n  {HOSTILE}"}}
    tokens = {"generated": 900, "trained": 800, "dropped": {"stale": 90, HOSTILE: 10}, "in_flight": 0}
    idle = {"trainer": CAUSES, "rollout-0": {"generate": 80.0, "staleness bound": 20.0}}
    found = {"name": "done", "seed": 0, "steps": STEPS, "wall_s": 61.5, "weight_version": STEPS, "tokens_per_s": 900.0}
    found |= {"success_before": 0.25, "success_after": 0.75, "reward_first": 0.0, "reward_last": 1.0}
    found |= {"max_staleness": 2, "staleness": {"max": 1, "histogram": {"0": 400, "1": 400}}, "overlap_share": 0.6}
    return found | {"failures": causes, "tokens": tokens, "idle": idle, "advice": ADVICE, "waits": {}, "phases_s": {}}


def record(run, *, ended):
    """Write what a run of some steps leaves."""
    run.write_config(f'name = "{run.path.name[:8]}"\n{TABLES}')
    clock = Clock()
    timeline = Timeline(clock=clock)
    for step in range(1, STEPS + 1):
        run.log_metrics(metrics(step), step=step, version=step)
        run.log_trajectory({"step": step, "group_id": step, **trajectory(step)})
        with timeline.wait("train", "rollouts"), timeline.span("rollout", f"group {step}"):
            clock.now_s += 1.0
        with timeline.span("train", f"step {step}"):
            clock.now_s += 0.5
    run.log_metrics({"eval/success": 0.75, "eval/reward_mean": 0.7}, step=STEPS, version=STEPS)
    (run.logs / "driver.log").write_text(f"2026-01-02 03:04:05.678 WARNING asyncrl.trainer: {HOSTILE}\nTraceback\n")
    timeline.save(run.path / "timeline.json")
    if ended:
        run.write_summary(summary())


def live_status(run, step):
    waits = (Waiting(owner="train", reason="rollouts", for_s=3.0, deadline_s=None),)
    work = (Doing(stage="rollout", name=HOSTILE, for_s=2.0),)
    causes = (f"replica rollout-0 serves, {HOSTILE}",)
    idle = {"trainer": CAUSES, "rollout-0": {"generate": 100.0}}
    about = {"waits": waits, "work": work, "causes": causes, "idle": idle, "advice": ADVICE}
    write_status(run.status_path, RunStatus(pid=os.getpid(), at=time.time(), step=step, steps=STEPS + 5, **about))


def damage(path):
    """Put into every file what a crash, a full disk or another program may leave."""
    for name in ("metrics.jsonl", "trajectories.jsonl"):
        with (path / name).open("ab") as file:
            file.write(b'{"step": NaN, "reward_mean": [}\n\xff\xfe\x00\n[]\n' + b"[" * 5000 + b'\n{"step": "x"}\n{"st')
    for name in ("status.json", "timeline.json"):
        (path / name).write_bytes(b'{"traceEvents": [{"ph": ')
    shapes = {"idle": 3, "advice": [HOSTILE], "failures": {"a": 1}, "tokens": None, "staleness": {}, "reward_last": "x"}
    (path / "summary.json").write_text(json.dumps(shapes))
    (path / "logs" / "driver.log").write_bytes(b"\xff\xfe" * 100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs in every state; the live one is that of this process."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("done", "damaged", "other"):
        with RunDirectory.create(root, name) as run:
            record(run, ended=True)
        run.path.rename(root / name)
    damage(root / "damaged")
    (root / "other").rename(root / HOSTILE.replace("/", "|"))
    (root / "empty").mkdir()
    (root / "empty" / "config.toml").write_text("")
    with RunDirectory.create(root, "live") as run:
        record(run, ended=False)
        live_status(run, STEPS)
        run.path.rename(root / "live")
        yield root


@contextmanager
def served(folder):
    """Serve a folder by the command; yields the address, with its token."""
    command = [sys.executable, "-m", "asyncrl", "page", str(folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as server:
        try:
            assert server.stdout is not None
            words = server.stdout.readline().split()
            yield next(word for word in words if word.startswith("http"))
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(20) == 0


@pytest.fixture(scope="module")
def address(folder):
    with served(folder) as url:
        yield url


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


def test_a_file_that_leads_to_the_address_opens_the_page(browser, address):
    with _redirect(address) as file:
        page = browser.new_page()
        page.goto(file)
        page.wait_for_selector("main h1")
        page.close()


@pytest.fixture(params=[(size, scheme) for size in SIZES for scheme in ("light", "dark")], ids=str)
def tab(request, browser, address):
    """A tab that keeps what went wrong in it."""
    (width, height), scheme = request.param
    with watched(browser, address, {"width": width, "height": height}, scheme) as page:
        yield page


@contextmanager
def watched(browser, url, size, scheme):
    context = browser.new_context(viewport=size, color_scheme=scheme)
    page = context.new_page()
    page.wrong = []
    page.on(
        "console", lambda message: page.wrong.append(message.text) if message.type in {"error", "warning"} else None
    )
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    here = urlsplit(url).netloc
    page.on("request", lambda sent: page.wrong.append(sent.url) if elsewhere(sent.url, here) else None)
    page.goto(url)
    page.wait_for_selector("main h1")
    try:
        yield page
    finally:
        context.close()


def elsewhere(url, here):
    return urlsplit(url).scheme not in {"data", "blob"} and urlsplit(url).netloc != here


def go(page, address):
    """Open a view, and wait until it is drawn."""
    page.evaluate("document.querySelector('main').replaceChildren()")
    page.evaluate(
        "address => { if (location.hash === address) location.reload(); else location.hash = address }", address
    )
    page.wait_for_selector("main h1")
    page.wait_for_timeout(150)


def until(page, truth):
    """Wait until a JavaScript expression holds. The page's policy forbids the evaluation that Playwright would use."""
    for _look in range(150):
        if page.evaluate(truth):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"it never held: {truth}")


def view_of(name, view):
    return f"#/run/{quote(name, safe='')}/{view}"


def check(page, what):
    assert page.wrong == [], what
    assert page.evaluate("window.attacked") is None, what
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), f"{what} scrolls sideways"
    assert page.inner_text("main h1") != "This cannot be shown", (what, page.inner_text("main"))
    found = axe.Axe().run(page).response["violations"]
    serious = [
        (each["id"], [node["html"][:200] for node in each["nodes"][:3]])
        for each in found
        if each["impact"] in {"serious", "critical"}
    ]
    assert serious == [], what


@pytest.mark.parametrize(
    "name", ["done", "live", "damaged", "empty", HOSTILE.replace("/", "|")], ids=lambda name: name[:7]
)
def test_every_view_is_sound(tab, name):
    for view in VIEWS:
        if view == "rollouts/0" and name == "empty":
            continue
        go(tab, view_of(name, view))
        check(tab, f"{view} of {name}")
        if view in {"rollouts/0", "failures"} and name in {"done", "live"}:
            assert "<img src=x onerror=" in tab.inner_text("main"), view


def test_the_list_and_two_runs_side_by_side(tab, folder):
    go(tab, "#/")
    check(tab, "the list")
    assert tab.locator("main tbody tr").count() == 5
    go(tab, f"#/compare/done/{quote(HOSTILE.replace('/', '|'), safe='')}")
    check(tab, "two runs")


def test_figures_of_a_finished_run(browser, address):
    with watched(browser, address, {"width": 1440, "height": 900}, "light") as page:
        go(page, view_of("done", "overview"))
        said = page.inner_text("main")
        for each in ("Reward", "Held-out success", "Entropy", "Gradient norm", "Learning rate", "Tokens per second"):
            assert each in said
        assert "bottleneck is <img" in said
        assert "rollouts 45.0 %" in said
        assert page.locator("canvas").count() >= 8
        go(page, view_of("done", "timeline"))
        assert "waits for rollouts" in page.inner_text("main")
        go(page, view_of("done", "rollouts/3"))
        page.get_by_text("2+2", exact=True).hover()
        page.locator(".tokens").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert "probability" in page.inner_text("main")


def test_rollouts_are_filtered(browser, address):
    with watched(browser, address, {"width": 1440, "height": 900}, "light") as page:
        go(page, view_of("done", "rollouts"))
        assert page.locator("main tbody tr").count() == STEPS
        page.fill("input[name=step]", "7")
        page.keyboard.press("Enter")
        until(page, "document.querySelectorAll('main tbody tr').length === 1")
        check(page, "filtered rollouts")


def test_a_live_run_is_followed(browser, address, folder):
    with watched(browser, address, {"width": 1440, "height": 900}, "light") as page:
        go(page, view_of("live", "overview"))
        assert f"step {STEPS}" in page.inner_text("main")
        time.sleep(1.5)  # the stream of changes has had its first look
        line = json.dumps({"step": STEPS + 1, "time_s": 99.0, "version": STEPS + 1, **metrics(STEPS + 1)})
        with (folder / "live" / "metrics.jsonl").open("a") as file:
            file.write(line + "\n")
        until(page, f"document.querySelector('main').innerText.includes('step {STEPS + 1}')")
        assert page.wrong == []


def test_a_tab_that_is_not_seen_keeps_no_connection_and_catches_up(browser, tmp_path):
    def hidden(page, truth):
        page.evaluate(f"Object.defineProperty(document, 'hidden', {{ value: {truth}, configurable: true }})")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

    with served(tmp_path) as url, watched(browser, url, {"width": 1440, "height": 900}, "light") as page:
        with RunDirectory.create(tmp_path, "run") as run:
            record(run, ended=False)
            go(page, view_of(run.path.name, "overview"))
            hidden(page, "true")
            assert page.evaluate("stream === null")
            run.log_metrics(metrics(STEPS + 1), step=STEPS + 1, version=STEPS + 1)
            hidden(page, "false")
            until(page, f"document.querySelector('main').innerText.includes('step {STEPS + 1}')")
        assert page.wrong == []


def test_what_changes_while_something_has_the_focus_is_drawn_after_it(browser, tmp_path):
    with served(tmp_path) as url, watched(browser, url, {"width": 1440, "height": 900}, "light") as page:
        with RunDirectory.create(tmp_path, "run") as run:
            record(run, ended=False)
            live_status(run, STEPS)
            go(page, view_of(run.path.name, "overview"))
            page.locator("main .scroll").first.focus()
            assert page.inner_text("main h1").endswith("training")
        page.wait_for_timeout(2500)
        assert page.inner_text("main h1").endswith("training")
        page.evaluate("document.activeElement.blur()")
        until(page, "document.querySelector('main h1').innerText.endsWith('ended')")
        assert page.wrong == []


def test_a_window_of_the_timeline_in_which_nothing_was_recorded_can_be_left(browser, address):
    with watched(browser, address, {"width": 1440, "height": 900}, "light") as page:
        page.evaluate("window_ = { name: 'done', start: 1000, end: 1001 }")
        go(page, view_of("done", "timeline"))
        assert "Nothing was recorded" in page.inner_text("main")
        page.get_by_text("All", exact=True).click()
        until(page, "document.querySelector('main').innerText.includes('In figures')")
        check(page, "the whole timeline")


def test_fifty_runs_and_no_run(browser, tmp_path):
    with served(tmp_path) as url, watched(browser, url, {"width": 390, "height": 844}, "light") as page:
        check(page, "no run")
        for number in range(50):
            with RunDirectory.create(tmp_path, f"run-{number}") as run:
                run.write_config(TABLES)
                run.log_metrics(metrics(number % STEPS), step=number + 1, version=number)
        page.reload()
        until(page, "document.querySelectorAll('main tbody tr').length === 50")
        check(page, "fifty runs")


def test_the_page_is_walked_by_keyboard(browser, address):
    with watched(browser, address, {"width": 1440, "height": 900}, "light") as page:
        go(page, view_of("done", "overview"))
        for _key in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent") == "Rollouts":
                break
        page.keyboard.press("Enter")
        page.wait_for_selector("input[name=step]")
        assert page.wrong == []
