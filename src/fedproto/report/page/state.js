// The view chosen by the reader: kept in the address, so that it can be shared.

const DEFAULTS = {
  metric: null, base: null, data: null, x: "round", smooth: null, log: false, seeds: false, find: "", sort: "",
  columns: false, all: false, features: null, only: true, theme: "system",
};
const SETS = ["hide", "without"];
const MOST_GROUPS = 24;

page.state = { ...DEFAULTS, hide: new Set(), without: new Set() };

// "#section?name=value&…": the section to jump to and whatever is not as it is by default.
function readAddress() {
  const [section, query] = location.hash.slice(1).split("?");
  const given = new URLSearchParams(query || "");
  const state = { ...DEFAULTS, smooth: Math.round(100 * page.data.window) };
  for (const name of SETS) state[name] = new Set(given.getAll(name));
  for (const [name, value] of Object.entries(state)) {
    if (SETS.includes(name) || !given.has(name)) continue;
    const text = given.get(name);
    state[name] = typeof value === "boolean" ? text === "1" : name === "smooth" ? Math.min(30, Math.max(0, Number(text) || 0)) : text;
  }
  page.state = state;
  page.section = section || "";
}

function writeAddress() {
  const query = new URLSearchParams();
  for (const name of SETS) for (const value of page.state[name]) query.append(name, value);
  const usual = { ...DEFAULTS, smooth: Math.round(100 * page.data.window) };
  for (const [name, value] of Object.entries(usual)) {
    const chosen = page.state[name];
    if (chosen === value || chosen === null) continue;
    query.set(name, typeof chosen === "boolean" ? (chosen ? "1" : "0") : chosen);
  }
  const text = query.toString();
  const address = `#${page.section}${text ? `?${text}` : ""}`;
  if (address !== location.hash && !(address === "#" && !location.hash)) history.replaceState(null, "", address);
}

function change(changes) {
  Object.assign(page.state, changes);
  writeAddress();
  drawPage();
}

function partsOf(condition) {
  return Object.entries({ ...(page.several.families && !page.family ? { data: condition.family } : {}), ...condition.parts }).map(([name, value]) => `${name}: ${value}`);
}

// Methods, conditions and groups that are in view, found once per drawing.
function applyFilters() {
  const { data, state } = page;
  const words = state.find.toLowerCase().split(/\s+/).filter(Boolean);
  page.family = familyInView();
  const open = data.conditions.map((condition) => (!page.family || condition.family === page.family) && !partsOf(condition).some((part) => state.without.has(part)));
  page.shown = data.groups.map((group, index) => ({ ...group, index })).filter((group) => {
    const under = group.conditions.filter((index) => open[index]);
    const text = [methodTitle(group), ...under.map((index) => `${data.conditions[index].family} ${data.conditions[index].title}`)].join(" ").toLowerCase();
    return under.length > 0 && !state.hide.has(methodTitle(group)) && words.every((word) => text.includes(word));
  });
  page.conditions = data.conditions.map((condition, index) => ({ ...condition, index, groups: page.shown.filter((group) => group.conditions.includes(index)) }))
    .filter((condition) => open[condition.index] && condition.groups.length);
  page.methods = [...new Set(page.shown.map((group) => group.method))].sort((one, other) => one - other);
  if (!data.metrics.some((metric) => metric.name === state.metric)) state.metric = null;
  if (!data.methods.some((method) => method.title === state.base)) state.base = null;
  page.metric = metricNamed(state.metric || data.metric);
}

// Large studies open on the data set with most runs; null for all data sets.
function familyInView() {
  const { data, state } = page;
  const counts = new Map();
  for (const run of data.runs) { const { family } = data.conditions[data.groups[run.group].conditions[0]]; counts.set(family, (counts.get(family) || 0) + 1); }
  if (counts.has(state.data)) return state.data;
  return state.data === "all" || data.groups.length <= MOST_GROUPS || counts.size < 2 ? null : [...counts].sort((one, other) => other[1] - one[1])[0][0];
}

// The baseline on a data set: the reader's choice where it was run there.
function baseIn(family) {
  const { data, state } = page;
  const chosen = data.methods.findIndex((method) => method.title === state.base);
  const present = data.groups.some((group) => group.method === chosen && data.conditions[group.conditions[0]].family === family);
  return present ? chosen : data.methods.findIndex((method) => method.title === data.baselines[family]);
}

function titleOf(condition) {
  return condition.title || "all runs";
}

// The bar: a search box, a chip per method, a chip per value that tells conditions apart.
function drawBar() {
  const { data, state } = page;
  const bar = document.getElementById("runs");
  const inView = data.conditions.filter((condition) => !page.family || condition.family === page.family);
  const parts = inView.length > 1 ? [...new Set(inView.flatMap(partsOf))] : [];
  const here = data.methods.map((method, index) => [method, index]).filter(([, index]) => data.groups.some((group) => group.method === index && group.conditions.some((one) => inView.includes(data.conditions[one]))));
  const names = [...new Set(parts.map((part) => part.split(": ")[0]))];
  const wanted = JSON.stringify([here.map(([method]) => method.title), parts]);
  if (bar.dataset.wanted !== wanted) {
    bar.dataset.wanted = wanted;
    bar.replaceChildren(
      make("div", { class: "line" },
        make("label", { class: "find" }, make("span", { class: "quiet" }, "Search methods and conditions"),
          make("input", { id: "find", type: "search", placeholder: "Search", oninput: (event) => change({ find: event.target.value }) })),
        make("span", { id: "count", role: "status" }),
        make("button", { type: "button", id: "reset", onclick: () => change({ hide: new Set(), without: new Set(), find: "" }) }, "show all")),
      make("details", { open: here.length + parts.length < 13 && innerWidth > 600 || undefined }, make("summary", {}, `Methods${parts.length ? " and conditions" : ""}`),
      make("div", { class: "chips", role: "group", "aria-label": "Methods" }, here.map(([method, index]) => chip(method.title, "hide", method.title, index))),
      make("div", { class: "facets" }, names.map((name) => make("div", { class: "chips", role: "group", "aria-label": name }, make("span", { class: "name" }, name),
        parts.filter((part) => part.split(": ")[0] === name)
          .sort((one, other) => one.localeCompare(other, "en", { numeric: true }))
          .map((part) => chip(part.slice(name.length + 2), "without", part, null)))))));
  }
  for (const button of bar.querySelectorAll(".chip")) {
    button.setAttribute("aria-pressed", String(!state[button.dataset.set].has(button.dataset.value)));
    if (button.dataset.method) button.firstChild.replaceChildren(swatch(Number(button.dataset.method)));
  }
  const find = document.getElementById("find");
  if (find.value !== state.find) find.value = state.find;
  const all = page.shown.length === data.groups.length;
  document.getElementById("reset").hidden = !(state.hide.size || state.without.size || state.find);
  document.getElementById("count").textContent = all ? `${data.groups.length} group${data.groups.length === 1 ? "" : "s"} of runs` : `${page.shown.length} of ${data.groups.length} groups shown`;
  document.documentElement.style.setProperty("--bar", `${getComputedStyle(bar).position === "sticky" ? bar.offsetHeight : 0}px`);
}

function chip(text, set, value, method) {
  return make("button", {
    type: "button", class: "chip", "data-set": set, "data-value": value, "data-method": method,
    onclick: () => toggle(set, value),
  }, method === null ? null : make("span", { class: "mark" }), text);
}

function toggle(set, value) {
  const chosen = new Set(page.state[set]);
  if (!chosen.delete(value)) chosen.add(value);
  change({ [set]: chosen });
}
