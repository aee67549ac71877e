// Builds the page and draws it again when something changes.

const THEMES = ["system", "light", "dark"];

function buildPage() {
  const main = document.getElementById("main");
  const absent = [];
  for (const section of page.sections) {
    const empty = section.empty?.();
    section.host = make("section", { id: section.id, "aria-labelledby": `${section.id}-title`, hidden: Boolean(empty) },
      make("div", { class: "head" }, make("h2", { id: `${section.id}-title` }, section.title), section.rows ? saveButton(section) : null));
    main.append(section.host);
    section.build(section.host);
    if (empty) absent.push(absentLine(section, ...empty));
  }
  page.present = page.sections.filter((section) => !section.host.hidden);
  main.append(make("section", { id: "absent", "aria-labelledby": "absent-title", hidden: absent.length === 0 },
    make("h2", { id: "absent-title" }, "Not available"), make("ul", { class: "absent" }, absent)));
  document.getElementById("contents").append(...page.present.map((section) => make("a", { href: `#${section.id}`, onclick: (event) => { event.preventDefault(); goTo(section.id); } }, section.short || section.title)));
  buildHeader();
}

// Sections with nothing to show take one line each, which says how to fill them.
function absentLine(section, text, command) {
  return make("li", { "data-section": section.id }, make("b", {}, section.title), `. ${text} `, command ? make("code", {}, command) : null);
}

// Sections in view are drawn at once, the rest as soon as there is time, so that clicks feel immediate.
function drawPage(everything = false) {
  applyFilters();
  drawBar();
  const near = (section) => { const { top, bottom } = section.host.getBoundingClientRect(); return bottom > -innerHeight / 2 && top < 1.5 * innerHeight; };
  const now = new Set(page.present.filter((section) => everything || page.printing || near(section)));
  for (const section of now) section.draw(section.host);
  page.pending = page.present.filter((section) => !now.has(section));
  clearTimeout(page.later);
  if (page.pending.length) page.later = setTimeout(drawPending);
}

function drawPending() {
  const section = page.pending.shift();
  if (section) section.draw(section.host);
  if (page.pending.length) page.later = setTimeout(drawPending);
}

function goTo(id) {
  const section = document.getElementById(id);
  if (!section || section.hidden) return;
  page.section = id;
  writeAddress();
  section.scrollIntoView();
  const title = section.querySelector("h2");
  title.setAttribute("tabindex", -1);
  title.focus({ preventScroll: true });
}

function buildHeader() {
  const { data } = page;
  const seconds = data.runs.reduce((sum, run) => sum + run.seconds.total, 0);
  const over = data.runs.filter((run) => run.ended).length;
  document.getElementById("subtitle").textContent =
    `${data.runs.length} run${data.runs.length === 1 ? "" : "s"}, ${over} finished, ${formatSeconds(seconds)} of training; as of ${new Date(data.made).toLocaleString()}`;
  document.getElementById("problems").replaceChildren(...data.problems.map((text) => make("p", { class: "problem" }, text)));
}

const systemDark = matchMedia("(prefers-color-scheme: dark)");

function applyTheme() {
  const theme = THEMES.includes(page.state.theme) ? page.state.theme : "system";
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

readAddress();
applyTheme();
buildPage();
drawPage(true);
if (page.section) document.getElementById(page.section)?.scrollIntoView();
addEventListener("hashchange", () => { readAddress(); applyTheme(); drawPage(); goTo(page.section); });
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); goTo(page.present[0].id); });
document.getElementById("theme").addEventListener("click", () => {
  page.state.theme = THEMES[(THEMES.indexOf(page.state.theme) + 1) % THEMES.length];
  applyTheme();
  change({});
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
