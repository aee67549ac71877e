// Puts the page together, draws it again when something changes, and asks for news in live mode.

const POLL_SECONDS = 2;
const THEMES = ["system", "light", "dark"];

function buildPage() {
  const main = document.getElementById("main");
  const contents = document.getElementById("contents");
  for (const section of page.sections) {
    section.host = make("section", { id: section.id, "aria-labelledby": `${section.id}-title` }, make("h2", { id: `${section.id}-title` }, section.title));
    main.append(section.host);
    contents.append(make("a", { href: `#${section.id}` }, section.short || section.title));
    section.build(section.host);
  }
}

function drawPage() {
  drawHeader();
  drawToggles();
  const waiting = page.data.runs.length === 0;
  for (const id of ["contents", "runs", "main"]) document.getElementById(id).hidden = waiting;
  document.getElementById("waiting").hidden = !waiting;
  if (waiting) return;
  for (const section of page.sections) section.draw(section.host);
}

function drawHeader() {
  const { data } = page;
  const seconds = data.runs.reduce((sum, run) => sum + run.seconds, 0);
  const over = data.runs.filter((run) => run.ended).length;
  document.getElementById("subtitle").textContent =
    `${data.runs.length} run${data.runs.length === 1 ? "" : "s"}, ${over} finished, ${formatSeconds(seconds)} of training; as of ${new Date(data.made).toLocaleString()}`;
  document.getElementById("problems").replaceChildren(...data.problems.map((text) => make("p", { class: "problem" }, text)));
}

// One button a group; they are kept while the groups stay the same, so that the focus is too.
function drawToggles() {
  const host = document.getElementById("runs");
  const titles = page.data.groups.map((group) => group.title);
  if (host.dataset.titles !== JSON.stringify(titles)) {
    host.dataset.titles = JSON.stringify(titles);
    host.replaceChildren(...titles.map((title, place) => make("button", {
      type: "button", class: "toggle", "data-group": place, title: "Click to show or hide; double-click to show only this one",
      onclick: () => toggleRun(title), ondblclick: () => showOnly(title),
    }, make("span", { class: "mark" }), title)));
    if (titles.length > 1) {
      host.append(make("button", { type: "button", class: "all", "aria-label": "Show all runs", onclick: () => hideRuns([]) }, "all"),
        make("button", { type: "button", class: "all", "aria-label": "Hide all runs", onclick: () => hideRuns(titles) }, "none"));
    }
  }
  host.querySelectorAll(".toggle").forEach((button, place) => {
    button.setAttribute("aria-pressed", String(isShown(place)));
    button.querySelector(".mark").replaceChildren(swatch(place));
  });
}

function toggleRun(title) {
  const { hidden } = page.state;
  if (!hidden.delete(title)) hidden.add(title);
  drawPage();
}

function showOnly(title) {
  hideRuns(page.data.groups.map((group) => group.title).filter((other) => other !== title));
}

function hideRuns(titles) {
  page.state.hidden = new Set(titles);
  drawPage();
}

let theme = "system";
const systemDark = matchMedia("(prefers-color-scheme: dark)");

function applyTheme() {
  const dark = !page.printing && (theme === "dark" || (theme === "system" && systemDark.matches));
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.getElementById("theme").textContent = `Theme: ${theme}`;
}

function setPrinting(printing) {
  if (page.printing === printing) return;
  page.printing = printing;
  applyTheme();
  drawPage();
}

async function askForNews() {
  const status = document.getElementById("live");
  let tag = null;
  status.hidden = false;
  for (;;) {
    try {
      const answer = await fetch("data.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag");
        page.data = { ...page.data, ...(await answer.json()) };
        drawPage();
      }
      status.textContent = `● live, ${new Date().toLocaleTimeString()}`;
    } catch {
      status.textContent = "○ the server has gone; this is its last word";
    }
    await new Promise((resolve) => setTimeout(resolve, 1000 * POLL_SECONDS));
  }
}

applyTheme();
buildPage();
drawPage();
document.getElementById("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  applyTheme();
  drawPage();
});
systemDark.addEventListener("change", () => { applyTheme(); drawPage(); });
addEventListener("beforeprint", () => setPrinting(true));
addEventListener("afterprint", () => setPrinting(false));
let width = document.documentElement.clientWidth;
let waiting = null;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    if (page.printing || width === document.documentElement.clientWidth) return;
    width = document.documentElement.clientWidth;
    drawPage();
  }, 100);
});
if (page.data.live) askForNews();
