"""The web page in a real browser: what its reader sees, and what its buttons do."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, expect

from kybernate.node.failure import Unavailable
from kybernate.page.access import Role
from kybernate.page.source import Action, ActionRefused
from kybernate.page.view import (
    Begin,
    Container,
    End,
    Event,
    Found,
    Gone,
    Gpu,
    Image,
    Lost,
    Operation,
    Put,
    Seat,
    Share,
    Tier,
)
from tests.browser.conftest import TIMEOUT_MS, logged_in
from tests.browser.scripted import GIB, Scripted, Served, recorded, served
from tests.gpu.page_record import Moment, encoded, state_at

expect.set_options(timeout=TIMEOUT_MS)
SUSPENDED = Container("k8s.io/b", "default/qwen/server", "registry/qwen:1", "running", "suspended", host_bytes=GIB)
AWAKE = Container("k8s.io/b", "default/qwen/server", "registry/qwen:1", "running", "attached", gpus=("GPU-0",))
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>&"\'{{1237*1091}}</pre>'


def test_wake_is_watched_live(source: Scripted, page_server: Served, context: BrowserContext) -> None:
    tab = logged_in(context, page_server)
    line = tab.locator("[data-section=containers] tr", has_text="default/qwen/server")
    line.get_by_role("button", name="Wake").click()
    dialog = tab.get_by_role("dialog")
    expect(dialog).to_contain_text("Wake default/qwen/server?")
    dialog.get_by_role("button", name="Wake").click()
    expect(tab.locator("#said")).to_contain_text("wake of k8s.io/b has begun")
    assert source.asked == [(Action.WAKE, "k8s.io/b")]
    began = Operation(
        "1", "resume", "running", "k8s.io/b", "default/qwen/server", created=100.0, step="copy", total=GIB
    )
    source.say(Put(began))
    operations = tab.locator("[data-section=operations]")
    expect(operations).to_contain_text("running")
    source.say(
        Put(Operation("1", "resume", "succeeded", "k8s.io/b", "default/qwen/server", created=100.0, ended=100.5)),
        Put(AWAKE),
        Put(Gpu("GPU-0", 0, "NVIDIA H100", 80 * GIB, 54 * GIB)),
    )
    expect(operations).to_contain_text("succeeded")
    expect(line.locator(".phase").first).to_have_text("running")
    expect(line).to_contain_text("500 ms")  # the wake's own bar
    expect(tab.locator("[data-section=gpus]")).to_contain_text("54.0 GiB of 80.0 GiB")
    expect(tab.locator("#gpu-GPU-0")).to_contain_text("default/qwen/server")
    expect(line.get_by_role("button", name="Sleep")).to_be_visible()


def test_recorded_moment_is_shown(context: BrowserContext, tmp_path: Path) -> None:
    wake = Operation(
        "1", "wake", "running", "k8s.io/b", "models/qwen", created=1.0, step="copy", done=GIB, total=2 * GIB
    )
    told = (Found("a-machine", ()), Begin(), Put(replace(SUSPENDED, title="models/qwen")), Put(wake), End())
    state = tmp_path / "state.jsonl"
    state.write_bytes(
        b"".join(encoded(Moment(0.0, change)) for change in state_at([Moment(0.0, one) for one in told], 1))
    )
    with served(recorded(state), tmp_path) as page_server:
        tab = logged_in(context, page_server)
        expect(tab.locator("[data-section=containers]")).to_contain_text("models/qwen")
        expect(tab.locator("[data-section=operations]")).to_contain_text("1.00 GiB of 2.00 GiB")
        expect(tab.locator("body")).not_to_contain_text("a-machine")


@pytest.mark.parametrize(
    ("path", "button", "asked"),
    [
        ("/", "Sleep default/llama/server", (Action.SLEEP, "k8s.io/a")),
        ("/", "Checkpoint default/llama/server", (Action.CHECKPOINT, "k8s.io/a")),
        ("/images", "Restore llama-1", (Action.RESTORE, "image-1")),
        ("/images", "Pin llama-1", (Action.PIN, "image-1")),
        ("/images", "Unpin qwen-1", (Action.UNPIN, "image-2")),
    ],
)
def test_button_does_what_it_says(
    source: Scripted, page_server: Served, context: BrowserContext, path: str, button: str, asked: tuple[Action, str]
) -> None:
    tab = logged_in(context, page_server)
    tab.goto(page_server.url + path)
    tab.get_by_role("button", name=button, exact=True).click()
    tab.get_by_role("dialog").get_by_text("Cancel").click()
    assert source.asked == []
    tab.get_by_role("button", name=button, exact=True).click()
    tab.get_by_role("dialog").get_by_role("button").click()
    expect(tab.locator("#said")).to_contain_text("has begun")
    assert source.asked == [asked]


def test_refusal_is_shown(source: Scripted, page_server: Served, context: BrowserContext) -> None:
    source.refusal = ActionRefused("GPU 0 has no room", state="it is suspended", advice="suspend another one")
    tab = logged_in(context, page_server)
    tab.get_by_role("button", name="Wake default/qwen/server").click()
    tab.get_by_role("dialog").get_by_role("button", name="Wake").click()
    expect(tab.locator("#said")).to_have_text("GPU 0 has no room. it is suspended. suspend another one.")


def test_buttons_work_without_scripts(browser: Browser, source: Scripted, page_server: Served) -> None:
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(page_server.login())
    tab.get_by_role("button", name="Log in with this link").click()
    tab.get_by_role("button", name="Wake default/qwen/server").click()
    tab.get_by_role("button", name="Wake").click()
    expect(tab.get_by_role("status").first).to_contain_text("wake of k8s.io/b has begun")
    assert source.asked == [(Action.WAKE, "k8s.io/b")]
    context.close()


def test_viewer_has_no_buttons(source: Scripted, page_server: Served, context: BrowserContext) -> None:
    tab = logged_in(context, page_server, Role.VIEWER)
    for path in ("/", "/seats", "/images", "/container?container=k8s.io/b"):
        tab.goto(page_server.url + path)
        expect(tab.locator("button[form=ask]")).to_have_count(0)
    for path in ("/confirm?action=wake&key=k8s.io/b", "/log?container=k8s.io/a", "/playground"):
        answer = tab.request.get(page_server.url + path)
        assert answer.status == 403, path
    for path in ("/act", "/chat"):
        assert tab.request.post(page_server.url + path, form={"action": "wake", "key": "k8s.io/b"}).status == 403
    assert source.asked == []


def test_names_inject_no_html(source: Scripted, page_server: Served, context: BrowserContext) -> None:
    hostile = Container(
        f"ns/{HOSTILE}", HOSTILE, HOSTILE, HOSTILE, HOSTILE, GIB, ("GPU-0",), HOSTILE, HOSTILE, HOSTILE, HOSTILE
    )
    tab = logged_in(context, page_server)
    titles = tab.title()
    source.say(
        Put(hostile),
        Put(Gpu(HOSTILE, 7, HOSTILE, 9, 8, (Share(hostile.key, 5), Share(HOSTILE, 2)))),
        Put(
            Seat(HOSTILE, HOSTILE, HOSTILE, (7,), HOSTILE, 1.0, hostile.key, HOSTILE, waits=(HOSTILE,), reason=HOSTILE)
        ),
        Put(Tier(HOSTILE, HOSTILE, 9, 8, 1, 2)),
        Put(Image(HOSTILE, HOSTILE, HOSTILE, 1.0, 9, 9, (HOSTILE,), pinned=True, states=(HOSTILE,))),
        Put(Operation("3", "resume", "succeeded", hostile.key, HOSTILE, created=1.0, ended=2.0)),  # a bar of its chart
        Put(Operation(HOSTILE, HOSTILE, "running", f"ns/{HOSTILE}", HOSTILE, HOSTILE, 1.0, step=HOSTILE, total=9)),
        Put(Operation("2", HOSTILE, "failed", "", HOSTILE, ended=2.0, error=HOSTILE, advice=HOSTILE)),
        Put(Event(1, 1.0, HOSTILE, "error", HOSTILE, HOSTILE)),
        Found(HOSTILE, ((HOSTILE, HOSTILE),)),
    )
    expect(tab.locator("[data-section=containers]")).to_contain_text("onerror")
    source.lines = [HOSTILE, "\x1b[31mred\x1b[0m"]
    addresses = ["/", "/seats", "/events", "/images"]
    addresses.append(
        "/container?" + tab.evaluate("key => new URLSearchParams({container: key}).toString()", hostile.key)
    )
    for path in addresses:
        tab.goto(page_server.url + path)
        tab.wait_for_load_state()
        assert tab.locator("main img").count() == 0, path
        assert tab.locator("main script").count() == 0, path
        assert "1349567" not in tab.locator("main").inner_text(), path  # no template was run
        assert HOSTILE in tab.locator("main").inner_text()
    assert titles.endswith("Kybernate")
    tab.goto(page_server.url + addresses[-1])
    expect(tab.locator("h1")).to_have_text(HOSTILE)


def test_agent_that_is_away_is_said_and_comes_back(
    source: Scripted, page_server: Served, context: BrowserContext
) -> None:
    tab = logged_in(context, page_server)
    source.say(Lost("no agent answers on unix:///run/kybernate/agent.sock"))
    expect(tab.get_by_role("alert")).to_contain_text("The agent does not answer")
    expect(
        tab.locator("[data-section=containers] tr", has_text="default/llama/server")
    ).to_be_visible()  # the last that is known
    source.say(Found("gpu-node"))
    expect(tab.locator("[data-section=status]")).to_contain_text("answers")


def test_server_that_is_away_comes_back(browser: Browser, source: Scripted, tmp_path: Path) -> None:
    context = browser.new_context()
    tab = context.new_page()
    with served(source, tmp_path) as first:
        tab.goto(first.login())
        tab.get_by_role("button", name="Log in with this link").click()
        tab.get_by_role("heading", name="GPUs").wait_for()
        port = int(first.url.rpartition(":")[2])
    expect(tab.locator("#said")).to_contain_text("does not answer")
    again = Scripted([AWAKE])
    with served(again, tmp_path, port=port):  # the key of its sessions is on the disk
        expect(tab.locator("#said")).to_contain_text("answers again")
        expect(tab.locator("[data-section=containers] tbody tr")).to_have_count(1)
    context.close()


def test_two_tabs_and_a_reload_in_the_middle(source: Scripted, page_server: Served, context: BrowserContext) -> None:
    one, other = logged_in(context, page_server), context.new_page()
    other.goto(page_server.url)
    source.say(Gone(SUSPENDED))
    one.reload()
    for tab in (one, other):
        expect(tab.locator("[data-section=containers] tr", has_text="default/qwen/server")).to_have_count(0)


def test_focus_stays_where_nothing_changed(source: Scripted, page_server: Served, context: BrowserContext) -> None:
    tab = logged_in(context, page_server)
    button = tab.get_by_role("button", name="Checkpoint default/llama/server")
    tab.locator("[data-section=containers]").wait_for()
    source.say(Put(AWAKE))
    expect(tab.get_by_role("button", name="Sleep default/qwen/server")).to_be_visible()
    button.focus()
    source.say(Put(SUSPENDED))
    expect(tab.get_by_role("button", name="Wake default/qwen/server")).to_be_visible()
    expect(button).to_be_focused()


def test_log_is_followed(source: Scripted, page_server: Served, context: BrowserContext) -> None:
    source.lines = ["loading weights", HOSTILE]
    tab = logged_in(context, page_server)
    tab.goto(f"{page_server.url}/container?container=k8s.io/a")
    expect(tab.locator("#log")).to_contain_text("loading weights")
    expect(tab.locator("#log")).to_contain_text("onerror")
    assert tab.locator("#log img").count() == 0


def test_memory_is_shown_by_its_owner(source: Scripted, page_server: Served, context: BrowserContext) -> None:
    tab = logged_in(context, page_server)
    card = tab.locator("#gpu-GPU-0")
    expect(card).to_contain_text("default/llama/server 28.0 GiB")
    expect(card).to_contain_text("other processes 2.00 GiB")
    expect(card).to_contain_text("free 50.0 GiB")
    shares = (Share("k8s.io/b", 40 * GIB), Share("k8s.io/a", 28 * GIB))
    source.say(Put(Gpu("GPU-0", 0, "NVIDIA H100", 80 * GIB, 68 * GIB, shares)), Put(AWAKE))
    expect(card).to_contain_text("free 12.0 GiB")
    bars = card.locator("svg rect[data-share]")
    expect(bars).to_have_count(2)
    assert [bars.nth(n).get_attribute("width") for n in (0, 1)] == ["50.00", "35.00"]
    expect(card.get_by_role("img")).to_have_accessible_name(re.compile("40.0 GiB by default/qwen/server"))


def test_seats_say_which_is_active_and_why_another_is_not(
    source: Scripted, page_server: Served, context: BrowserContext
) -> None:
    tab = logged_in(context, page_server)
    seats = tab.locator("[data-section=seats]").first
    expect(seats.locator("#seat-g00-s1")).to_contain_text("active")
    expect(seats.locator("#seat-g00-s2")).to_contain_text("before it: g00-s1")
    tab.goto(f"{page_server.url}/container?container=k8s.io/b")
    expect(tab.locator("#why")).to_contain_text("g00-s1 is busy, and has the higher priority. Open requests: use.")
    source.say(Put(Seat("g00-s2", "large", "g00", (0,), "active", 2.0, "k8s.io/b", "default/qwen/server")), Put(AWAKE))
    expect(tab.locator("#why")).to_contain_text("It is running. Its seat g00-s2 in the group g00 is active.")


def test_tier_names_its_images(source: Scripted, page_server: Served, context: BrowserContext) -> None:
    tab = logged_in(context, page_server)
    expect(tab.locator("#tier-disk")).to_contain_text("llama-1")
    source.say(*(Put(Image(f"i{n}", f"image-{n}", bytes=n, tiers=("disk",))) for n in range(10)))
    tab.locator("#tier-disk").get_by_role("link", name="all 11 images in disk").click()
    expect(tab.locator("[data-section=images] tbody tr")).to_have_count(11)


def test_log_of_an_agent_that_was_away_is_shown_once(
    source: Scripted, page_server: Served, context: BrowserContext
) -> None:
    source.lines, source.log_failure = ["one", "two"], Unavailable("no agent answers")
    tab = logged_in(context, page_server)
    tab.goto(f"{page_server.url}/container?container=k8s.io/a")
    expect(tab.locator("#log-state")).to_contain_text("no agent answers")
    source.log_failure = None
    expect(tab.locator("#log")).to_have_text("one\ntwo\n")
    source.end_log()
    expect(tab.locator("#log-state")).to_contain_text("The container is removed")
    expect(tab.locator("#log")).to_have_text("one\ntwo\n")


def test_tab_that_is_hidden_follows_nothing(source: Scripted, page_server: Served, context: BrowserContext) -> None:
    tab = logged_in(context, page_server)
    hide = "hidden => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }"
    tab.evaluate(hide, True)
    source.say(Put(Container("k8s.io/d", "default/new/server", state="running")))
    other = context.new_page()
    other.goto(page_server.url)
    expect(other.locator("[data-section=containers] tr", has_text="default/new/server")).to_be_visible()
    expect(tab.locator("[data-section=containers] tr", has_text="default/new/server")).to_have_count(0)
    tab.evaluate(hide, False)
    expect(tab.locator("[data-section=containers] tr", has_text="default/new/server")).to_be_visible()


def test_many_tabs_are_usable(source: Scripted, page_server: Served, context: BrowserContext) -> None:
    """One after the other is looked at: a browser has six connections to a host."""
    tabs = [logged_in(context, page_server)]
    hide = "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
    hide += "document.dispatchEvent(new Event('visibilitychange'))"
    for _ in range(8):
        tabs[-1].evaluate(hide)
        tabs.append(context.new_page())
        tabs[-1].goto(page_server.url)
        expect(tabs[-1].get_by_role("heading", name="GPUs")).to_be_visible()


def test_log_out_in_one_tab_is_seen_in_another(page_server: Served, context: BrowserContext) -> None:
    tab = logged_in(context, page_server)
    other = context.new_page()
    other.goto(page_server.url)
    tab.get_by_role("button", name="Log out").click()
    expect(tab).to_have_url(re.compile("/login$"))
    other.evaluate("fetch('/section/status').then(answer => { document.title = answer.status; })")
    expect(other).to_have_title("401")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_reads_with_assistive_tools(
    browser: Browser, source: Scripted, page_server: Served, scheme: str, width: int
) -> None:
    """axe-core finds nothing, on a telephone's width and on a screen's, dark and light."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})  # type: ignore[arg-type]  # one of playwright's words
    tab = logged_in(context, page_server)
    source.say(
        Put(Operation("1", "resume", "failed", "k8s.io/b", "b", created=1, ended=2, error="no room", advice="wait")),
        Put(Event(1, 1.0, "operation.failed", "error", "resume failed")),
        Lost("no agent answers"),
    )
    expect(tab.get_by_role("alert")).to_be_visible()
    source.lines = ["loading weights"]
    for path in ("/", "/seats", "/images", "/events", "/container?container=k8s.io/b", "/playground"):
        tab.goto(page_server.url + path)
        found = Axe().run(tab)
        assert found.violations_count == 0, f"{path}: {found.generate_report()}"
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} scrolls sideways"
    context.close()


def test_page_stays_quick_with_much(browser: Browser, tmp_path: Path) -> None:
    """500 containers and 100 000 events: lists have pages, and no step of the page's work is long."""
    source = Scripted(
        Container(f"k8s.io/{n}", f"default/model-{n:03}/server", "image", "running", "suspended", host_bytes=GIB)
        for n in range(500)
    )
    source.say(
        *(Put(Event(n, float(n), "container.suspended", "info", f"model {n} sleeps")) for n in range(1, 100_001))
    )
    context = browser.new_context()
    with served(source, tmp_path) as page_server:
        tab = logged_in(context, page_server)
        expect(tab.locator("[data-section=containers] tbody tr")).to_have_count(100)
        tab.get_by_role("link", name="Next").click()
        expect(tab.locator("[data-section=containers]")).to_contain_text("model-100")
        tab.get_by_label("Find a container").fill("model-499")
        tab.get_by_role("button", name="Find").click()
        expect(tab.locator("[data-section=containers] tbody tr")).to_have_count(1)
        tab.goto(f"{page_server.url}/events")
        expect(tab.locator("[data-section=events]")).to_contain_text("100000 in all")
        expect(tab.locator("[data-section=events] li")).to_have_count(100)
        expect(tab.locator("[data-section=events] li").first).to_contain_text("model 100000 sleeps")
    context.close()


def test_playground_needs_a_proxy(page_server: Served, context: BrowserContext) -> None:
    tab = logged_in(context, page_server)
    tab.goto(f"{page_server.url}/playground")
    expect(tab.locator("main")).to_contain_text("without the address of a proxy")


def test_link_is_for_one_login(page_server: Served, context: BrowserContext) -> None:
    link = page_server.login()
    tab = context.new_page()
    tab.goto(link)
    tab.reload()  # what only looks at it does not spend it
    tab.get_by_role("button", name="Log in with this link").click()
    tab.get_by_role("heading", name="GPUs").wait_for()
    context.clear_cookies()
    tab.goto(link)
    tab.get_by_role("button", name="Log in with this link").click()
    expect(tab.get_by_role("alert")).to_contain_text("not valid")


def test_log_out_ends_the_session(page_server: Served, context: BrowserContext) -> None:
    tab = logged_in(context, page_server)
    tab.get_by_role("button", name="Log out").click()
    expect(tab).to_have_url(re.compile("/login$"))
    tab.goto(page_server.url)
    expect(tab).to_have_url(re.compile("/login$"))
