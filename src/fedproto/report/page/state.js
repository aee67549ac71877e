// What the reader chose: kept in the address, so that a view can be shared, and applied to all.

const DEFAULTS = {
  metric: null, base: null, x: "round", smooth: null, log: false, seeds: false, find: "", sort: "",
  columns: false, all: false, by: "size", map: null, order: "size", features: null, only: true, theme: "system",
};
const SETS = ["hide", "without"];

page.state = { ...DEFAULTS, hide: new Set(), without: new Set(), zoom: {} };

// "#section?name=value&…": the section to jump to and whatever is not as it is by default.
function readAddress() {
  const [section, query] = location.hash.slice(1).split("?");
  const given = new URLSearchParams(query || "");
  const state = { ...DEFAULTS, smooth: Math.round(100 * page.data.window), zoom: page.state.zoom };
  for (const name of SETS) state[name] = new Set(given.getAll(name));
  for (const [name, value] of Object.entries(state)) {
    if (SETS.includes(name) || name === "zoom" || !given.has(name)) continue;
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
  return Object.entries({ ...(page.several.families ? { data: condition.family } : {}), ...condition.parts }).map(([name, value]) => `${name}: ${value}`);
}

// Methods, conditions and groups that are in view, found once per drawing.
function applyFilters() {
  const { data, state } = page;
  page.several = {
    families: new Set(data.conditions.map((condition) => condition.family)).size > 1,
    conditions: data.conditions.length > 1,
    seeds: data.groups.some((group) => group.seeds.length > 1),
  };
  const words = state.find.toLowerCase().split(/\s+/).filter(Boolean);
  const open = data.conditions.map((condition) => !partsOf(condition).some((part) => state.without.has(part)));
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
  page.base = data.methods.findIndex((method) => method.title === (state.base || data.first));
}

function titleOf(condition) {
  return condition.title || "all runs";
}

// The bar: a search box, a chip per method, a chip per value that tells conditions apart.
function drawBar() {
  const { data, state } = page;
  const bar = document.getElementById("runs");
  const parts = data.conditions.length > 1 ? [...new Set(data.conditions.flatMap(partsOf))] : [];
  const names = [...new Set(parts.map((part) => part.split(": ")[0]))];
  const wanted = JSON.stringify([data.methods.map((method) => method.title), parts]);
  if (bar.dataset.wanted !== wanted) {
    bar.dataset.wanted = wanted;
    bar.replaceChildren(
      make("div", { class: "line" },
        make("label", { class: "find" }, make("span", { class: "quiet" }, "Search methods and conditions"),
          make("input", { id: "find", type: "search", placeholder: "Search methods, conditions", oninput: (event) => change({ find: event.target.value }) })),
        make("span", { id: "count", role: "status" }),
        make("button", { type: "button", id: "reset", onclick: () => change({ hide: new Set(), without: new Set(), find: "" }) }, "show all")),
      make("div", { class: "chips", role: "group", "aria-label": "Methods" }, data.methods.map((method, index) => chip(method.title, "hide", method.title, index))),
      make("div", { class: "facets" }, names.map((name) => make("div", { class: "chips", role: "group", "aria-label": name }, make("span", { class: "name" }, name),
        parts.filter((part) => part.split(": ")[0] === name)
          .sort((one, other) => one.localeCompare(other, "en", { numeric: true }))
          .map((part) => chip(part.slice(name.length + 2), "without", part, null))))));
  }
  for (const button of bar.querySelectorAll(".chip")) {
    button.setAttribute("aria-pressed", String(!state[button.dataset.set].has(button.dataset.value)));
    if (button.dataset.method) button.firstChild.replaceChildren(swatch(Number(button.dataset.method)));
  }
  const find = document.getElementById("find");
  if (find.value !== state.find) find.value = state.find;
  const all = page.shown.length === data.groups.length;
  document.getElementById("reset").hidden = all;
  document.getElementById("count").textContent = all ? `${data.groups.length} group${data.groups.length === 1 ? "" : "s"} of runs` : `${page.shown.length} of ${data.groups.length} groups shown`;
  document.documentElement.style.setProperty("--bar", `${getComputedStyle(bar).position === "sticky" ? bar.offsetHeight : 0}px`);
}

function chip(text, set, value, method) {
  return make("button", {
    type: "button", class: "chip", "data-set": set, "data-value": value, "data-method": method,
    title: "Click to show or hide; double-click to show only this one",
    onclick: () => toggle(set, value), ondblclick: () => only(set, value),
  }, method === null ? null : make("span", { class: "mark" }), text);
}

function toggle(set, value) {
  const chosen = new Set(page.state[set]);
  if (!chosen.delete(value)) chosen.add(value);
  change({ [set]: chosen });
}

function only(set, value) {
  const name = value.split(": ")[0];
  const all = set === "hide" ? page.data.methods.map((method) => method.title)
    : [...new Set(page.data.conditions.flatMap(partsOf))].filter((part) => part.split(": ")[0] === name);
  const rest = set === "hide" ? [] : [...page.state[set]].filter((part) => part.split(": ")[0] !== name);
  change({ [set]: new Set([...rest, ...all.filter((other) => other !== value)]) });
}
