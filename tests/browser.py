"""Looks at every page of a built site in a browser without a window, on a desktop and on a phone, and says what is wrong with it.

python -m tests.browser site                       # the findings, one a line
python -m tests.browser site --pictures FOLDER     # pictures of all pages too
python -m tests.browser site --only guides/        # pages whose address has this in it

It needs playwright and Chrome or Chromium. It looks for pages wider than the screen, errors in the console, what cannot be loaded or comes
from elsewhere, pictures without a text, names that are broken over two lines in a title, text that is cut off, what scrolls without a shade that says
so, text with too little contrast, in light and dark, and more than nine entries in the sidebar.
"""

import argparse
import contextlib
import functools
import http.server
import pathlib
import shutil
import sys
import threading
from collections.abc import Iterator

WIDTHS = (1440, 412)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

LOOK = """
() => {
  const found = [], seen = new Set();
  const name = node => node.tagName.toLowerCase() + (node.className && node.className.split ? "." + node.className.split(" ")[0] : "");
  const say = (what, node, text) => {
    const line = `${what}: ${name(node)} ${JSON.stringify((text || node.textContent || node.src || "").trim().slice(0, 60))}`;
    if (!seen.has(line)) found.push(line);
    seen.add(line);
  };
  const visible = node => node.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true }) && node.getClientRects().length > 0;
  const main = document.querySelector("article") || document.body;
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) found.push(`wider than the screen: ${document.documentElement.scrollWidth} px`);

  for (const image of main.querySelectorAll("img")) {
    if (!image.complete || image.naturalWidth === 0) say("missing picture", image, image.src);
    if (!image.alt) say("picture without a text", image, image.src);
  }

  // A name is what stands between spaces, dots, underscores and slashes.
  for (const title of main.querySelectorAll("h1, h2, h3, h4")) {
    const walker = document.createTreeWalker(title, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      for (const word of walker.currentNode.data.matchAll(/[\\p{L}\\p{N}]+/gu)) {
        const range = document.createRange();
        range.setStart(walker.currentNode, word.index);
        range.setEnd(walker.currentNode, word.index + word[0].length);
        if (new Set([...range.getClientRects()].map(each => Math.round(each.top))).size > 1) say("broken name", title, word[0]);
      }
    }
  }

  for (const node of main.querySelectorAll("*")) {
    if (!visible(node) || node.closest("math") !== null && node.tagName !== "math") continue;
    const style = getComputedStyle(node);
    if (node.scrollWidth > node.clientWidth + 1 && node.clientWidth > 0 && style.display !== "inline") {
      if (["hidden", "clip"].includes(style.overflowX) && !node.matches(".md-nav *, .md-clipboard")) say("cut off", node);
      if (["auto", "scroll"].includes(style.overflowX) && style.backgroundImage === "none") say("scrolls without a shade", node);
    }
    const box = node.getBoundingClientRect();
    if (box.right > width + 1 && box.width > 0) {
      let parent = node.parentElement;
      while (parent && getComputedStyle(parent).overflowX === "visible") parent = parent.parentElement;
      if (!parent || parent === document.documentElement || parent === document.body) say("over the edge", node);
    }
  }

  // Contrast of text, as WCAG 2.2 counts it: 4.5, or 3 for large text.
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  const colours = new Map();
  const rgba = colour => {
    if (!colours.has(colour)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      colours.set(colour, [r, g, b, a / 255]);
    }
    return colours.get(colour);
  };
  const over = (top, below) => [0, 1, 2].map(n => top[n] * top[3] + below[n] * (1 - top[3]));
  const light = colour => {
    const [r, g, b] = colour.map(each => (each /= 255) <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = node => {
    const layers = [];
    for (; node; node = node.parentElement) {
      const colour = rgba(getComputedStyle(node).backgroundColor);
      if (colour[3] > 0) layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.data.trim(), node = texts.currentNode.parentElement;
    if (!text || !visible(node) || node.closest("script, style, noscript, [aria-hidden=true], .headerlink, .md-top")) continue;
    const style = getComputedStyle(node), below = ground(node);
    const front = over(rgba(style.color), below);
    const [high, low] = [light(front), light(below)].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize), large = size >= 24 || size >= 18.66 && style.fontWeight >= 700;
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < (large ? 3 : 4.5)) say(`contrast ${ratio.toFixed(2)}`, node, text);
    if (size < 9) say(`text of ${size} px`, node, text);
  }

  const entries = [...document.querySelectorAll(".md-sidebar--primary a.md-nav__link, .md-sidebar--primary label.md-nav__link")];
  const shown = entries.filter(each => visible(each) && each.getBoundingClientRect().height > 0);
  if (width > 1220 && new Set(shown.map(each => each.textContent.trim())).size > 9) found.push(`${shown.length} entries in the sidebar`);
  return found;
}
"""


def browser() -> str | None:
    """The path of an installed Chrome or Chromium."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@contextlib.contextmanager
def served(site: pathlib.Path) -> Iterator[str]:
    """The address at which this machine serves the folder."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def pages(site: pathlib.Path) -> list[str]:
    return sorted(path.parent.relative_to(site).as_posix() for path in site.rglob("index.html"))


def listen(page, address: str) -> list[str]:
    """The list to which the page's errors are added from now on."""
    heard: list[str] = []
    say = lambda text, wrong=True: heard.append(text) if wrong else None
    page.on("console", lambda message: say(message.text, message.type == "error"))
    page.on("pageerror", lambda error: say(str(error)))
    # What is aborted was under way when the page was left.
    page.on(
        "requestfailed", lambda asked: say(f"not loaded: {asked.url}", "ABORTED" not in (asked.failure or ""))
    )
    known = (address, "data:", "blob:")
    page.on("request", lambda asked: say(f"from elsewhere: {asked.url}", not asked.url.startswith(known)))
    page.on("response", lambda answer: say(f"{answer.status}: {answer.url}", answer.status >= 400))
    return heard


def findings(site: pathlib.Path, only: str = "", pictures: pathlib.Path | None = None) -> list[str]:
    """What is wrong, one a line, with the page, the width and the colours."""
    from playwright.sync_api import sync_playwright

    result: list[str] = []
    path = browser()
    assert path is not None, "no Chrome or Chromium is installed"
    with served(site) as address, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for width in WIDTHS:
            page = chromium.new_page(viewport={"width": width, "height": 900}, reduced_motion="reduce")
            heard = listen(page, address)
            for name in pages(site):
                if only not in f"{name}/":
                    continue
                heard.clear()
                page.goto(f"{address}{name}/" if name != "." else address, wait_until="load")
                for colours in ("default", "slate"):
                    page.evaluate(
                        "scheme => document.body.setAttribute('data-md-color-scheme', scheme)", colours
                    )
                    known = {*result}
                    label = f"{name} at {width} px"
                    result += [
                        line for each in page.evaluate(LOOK) if (line := f"{label}: {each}") not in known
                    ]
                    if pictures and colours == "default":
                        pictures.mkdir(parents=True, exist_ok=True)
                        page.screenshot(
                            path=pictures / f"{name.replace('/', '_')}_{width}.png", full_page=True
                        )
                result += [f"{label}: {line}" for line in heard]
            page.close()
        chromium.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("site", type=pathlib.Path, help="the folder of the built site")
    parser.add_argument("--only", default="", help="pages whose address has this in it")
    parser.add_argument("--pictures", type=pathlib.Path, help="write pictures of the pages into this folder")
    options = parser.parse_args()
    found = findings(options.site, options.only, options.pictures)
    print("\n".join(found) or "nothing is wrong")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
