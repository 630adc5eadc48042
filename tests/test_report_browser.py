"""The page in a real browser, from disk: no error, plots there, links work, tables sort and filter, themes change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, find_browser
from report_rows import STAMP, night, row, write_rows
from test_report_page import NASTY, verdict, write_gate

from tools.report import main

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here; on Debian: apt-get install chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM
    with Browser(PROGRAM, tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nights of three variants with a step, red and skipped rows, verdicts, and texts that want to be markup."""
    folder = tmp_path_factory.mktemp("page")
    rows = []
    for number in range(8):
        stamp = STAMP if number == 7 else night(number)
        for variant, us in (("torch", 100.0), ("deepep_ll", 60.0 if number < 4 else 90.0), (NASTY, 300.0)):
            rows += [
                row(stamp=stamp, variant=variant, tokens=8 * n, lat_us_p50=us * n, repro=f"{NASTY} {n}") for n in (1, 8)
            ]
    rows += [row(tokens=each, status="failed", reason=NASTY) for each in range(20, 32)]
    rows += [row(variant="deepep_ll", tokens=4096, timing="e2e", status="unsupported", reason="ll has 511 slots")]
    rows += [row(tokens=each, timing="e2e", iters_per_graph=None) for each in range(1, 200)]
    write_rows(folder / "rows.csv", rows)
    write_gate(folder / f"verdicts_{STAMP}.json", verdict(reason=NASTY))
    assert main([str(folder), "--out", str(folder / "page.html")]) == 0
    return folder / "page.html"


@pytest.fixture
def opened(browser: Browser, page: Path) -> Browser:
    browser.errors.clear()
    browser.open(page)
    return browser


def test_no_error_no_alert_and_plots_are_there(opened: Browser) -> None:
    assert opened.run("document.querySelectorAll('.plots figure svg').length") >= 8
    assert opened.run("document.querySelectorAll('#history ~ div svg').length") >= 6
    box = opened.run(
        "(({width, height}) => [width, height])(document.querySelector('.plots svg').getBoundingClientRect())"
    )
    assert min(box) > 200
    assert opened.errors == []


def test_an_error_in_a_page_would_be_seen(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text("<script>nothing.there()</script>")
    browser.errors.clear()
    browser.open(tmp_path / "bad.html")
    assert browser.errors
    browser.errors.clear()


def test_scripts_of_others_do_not_run(opened: Browser) -> None:
    opened.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = 1\">')")
    opened.run("new Promise((done) => setTimeout(done, 100))")
    assert opened.run("window.ran === undefined")
    opened.errors.clear()  # the policy's own words


def test_every_link_leads_to_something_that_is_then_seen(opened: Browser) -> None:
    dead = opened.run(
        """(async () => {
            const dead = [];
            for (const link of document.querySelectorAll('a')) {
                link.click();
                await new Promise((done) => setTimeout(done, 30));
                const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
                if (!target || !target.checkVisibility()) dead.push(link.href);
                const box = target && target.closest('details');
                if (box && !box.open) dead.push(link.href + ' stays shut');
            }
            return dead;
        })()"""
    )
    assert dead == []
    assert opened.errors == []


def shown(browser: Browser, heading: str) -> list[str]:
    return list(
        browser.run(
            f"""(() => {{
                const all = [...document.querySelectorAll('#table th')];
                const at = all.findIndex((th) => th.textContent === '{heading}');
                return [...document.querySelectorAll('#table tbody tr')].map((tr) => tr.cells[at].textContent);
            }})()"""
        )
    )


def click_heading(browser: Browser, heading: str) -> None:
    browser.run(f"[...document.querySelectorAll('#table th')].find((th) => th.textContent === '{heading}').click()")


def test_red_rows_come_first_and_more_rows_are_a_click_away(opened: Browser) -> None:
    statuses = shown(opened, "status")
    assert len(statuses) == 100
    assert statuses[:12] == ["failed"] * 12
    opened.run("document.querySelector('#more').click()")
    assert len(shown(opened, "status")) == 260
    assert opened.run("document.querySelector('#more').hidden")


def test_the_table_sorts_numbers_as_numbers_with_blanks_last(opened: Browser) -> None:
    click_heading(opened, "p50 us")
    up = [float(text) for text in shown(opened, "p50 us")]
    assert up == sorted(up)
    assert up[0] == 60
    click_heading(opened, "p50 us")
    down = [float(text) for text in shown(opened, "p50 us")]
    assert down == sorted(down, reverse=True)
    assert down[0] == 2400


def test_the_table_is_filtered_by_words_and_by_status(opened: Browser) -> None:
    opened.run("(() => { const box = document.querySelector('#filter'); box.value = 'DEEPEP_LL graph';"
               " box.dispatchEvent(new Event('input')); })()")  # fmt: skip
    assert set(shown(opened, "variant")) == {"deepep_ll"}
    assert opened.run("document.querySelector('#shown').textContent") == "16 of 16 rows"
    opened.run("(() => { const box = document.querySelector('#filter'); box.value = '';"
               " box.dispatchEvent(new Event('input')); })()")  # fmt: skip
    opened.run("[...document.querySelectorAll('#chips button')].find((b) => b.textContent.includes('failed')).click()")
    assert shown(opened, "status") == ["failed"] * 12


def test_a_repro_line_is_copied_as_it_is(opened: Browser) -> None:
    copied = opened.run(
        """(async () => {
            let copied;
            navigator.clipboard.writeText = async (text) => { copied = text; };
            document.querySelector('#table button.copy').click();
            await new Promise((done) => setTimeout(done, 20));
            return [copied, document.querySelector('#table button.copy').textContent];
        })()"""
    )
    assert copied == ["SECTION=comm COMM_LIST=torch TOKENS=128 ./run.sh", "copied"]


def test_the_theme_is_the_systems_until_a_press(browser: Browser, page: Path) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    line = "getComputedStyle(document.querySelector('.plots .series use')).fill"
    browser.open(page, dark=True)
    browser.run("localStorage.clear()")
    dark = browser.run(f"[{colour}, {line}]")
    browser.open(page, dark=False)
    light = browser.run(f"[{colour}, {line}]")
    assert dark[0] != light[0]
    assert dark[1] != light[1]
    for _ in range(2):
        browser.run("document.querySelector('#theme').click()")
    assert browser.run(f"[{colour}, {line}]") == dark, "auto, light, dark"
    browser.run("document.querySelector('#theme').click()")
    assert browser.run(f"[{colour}, {line}]") == light


def test_one_variant_can_be_seen_alone_and_points_tell_their_figures(opened: Browser) -> None:
    opened.run("document.querySelector('.legend button').click()")
    lit = "[...document.querySelectorAll('.series')].filter((each) => getComputedStyle(each).opacity === '1').length"
    every = "document.querySelectorAll('.series').length"
    assert 0 < opened.run(lit) < opened.run(every)
    told = opened.run(
        """(() => {
            const point = document.querySelector('.plots .series use');
            point.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: 300, clientY: 300}));
            return [document.querySelector('#tip').hidden, document.querySelector('#tip').textContent];
        })()"""
    )
    assert told[0] is False
    assert " tokens: " in told[1]


@pytest.mark.parametrize(("hours", "told"), [(1, None), (37, "(37 hours ago)"), (24 * 30, "(30 days ago)")])
def test_a_page_goes_stale_while_it_lies_there(browser: Browser, page: Path, hours: int, told: str | None) -> None:
    looked = f"Date.now = () => Date.parse('2026-11-30T19:00:00Z') + {hours} * 3.6e6"
    added = browser.ask("Page.addScriptToEvaluateOnNewDocument", source=looked)["identifier"]
    browser.open(page)
    browser.ask("Page.removeScriptToEvaluateOnNewDocument", identifier=added)
    seen = browser.run("[...document.querySelectorAll('.banner:not([hidden])')].map((each) => each.textContent)")
    assert seen == ([f"No data since 2026-11-30 19:00 UTC {told}: what is below is old."] if told else [])


def test_a_narrow_screen_scrolls_tables_and_never_the_page(browser: Browser, page: Path) -> None:
    browser.open(page, width=420)
    assert browser.run("document.documentElement.scrollWidth") <= 420
