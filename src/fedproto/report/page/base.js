"use strict";
// What all parts of the page share: the data, what the reader chose, and how to make elements.
// Texts come from run directories and may hold anything, so they are only ever set as text.

const page = {
  data: JSON.parse(document.getElementById("data").textContent),
  sections: [],
  printing: false,
  state: {
    hidden: new Set(),
    metric: null,
    smoothing: null,
    log: false,
    everySeed: false,
    zoom: {},
    sort: null,
    attentionRun: null,
    embeddingRun: null,
    onlyDifferences: true,
  },
};
const PRINT_WIDTH = 690;
const DASHES = [[], [9, 4], [9, 3, 2, 3], [2, 3]];
// The two colours of the palette that one of the backgrounds would swallow.
const REPLACED = {
  light: { "#F0E442": "#8c8300" },
  dark: { "#000000": "#f2f2f2", "#0072B2": "#3fa0e0" },
};

function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function makeSvg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null));
  return element;
}

function isDark() {
  return document.documentElement.dataset.theme === "dark";
}

function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function colorOf(group) {
  const color = page.data.colors[group % page.data.colors.length];
  return REPLACED[isDark() ? "dark" : "light"][color] || color;
}

function dashOf(group) {
  return DASHES[Math.floor(group / page.data.colors.length) % DASHES.length];
}

function swatch(group) {
  const line = makeSvg("line", {
    x1: 1, y1: 6, x2: 25, y2: 6, "stroke-width": 3, stroke: colorOf(group),
    "stroke-dasharray": dashOf(group).join(" ") || null,
  });
  return makeSvg("svg", { class: "swatch", viewBox: "0 0 26 12", "aria-hidden": "true" }, line);
}

function isShown(group) {
  return !page.state.hidden.has(page.data.groups[group].title);
}

function shownGroups() {
  return page.data.groups.map((group, place) => ({ ...group, place })).filter(({ place }) => isShown(place));
}

function metricNamed(name) {
  return page.data.metrics.find((metric) => metric.name === name) || { name, label: name, percent: false, lower: false };
}

function formatNumber(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(size >= 1000 ? 6 : 4)));
}

function formatPercent(value, digits = 1) {
  return Number.isFinite(value) ? `${(100 * value).toFixed(digits)} %` : "–";
}

// For the marks of an axis, which are round numbers.
function markAs(metric) {
  return metric.percent ? (value) => `${formatNumber(100 * value)} %` : formatNumber;
}

function formatAs(metric) {
  return metric.percent ? (value) => formatPercent(value) : formatNumber;
}

function formatSeconds(seconds) {
  if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(1)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function bytesOf(text) {
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let place = 0; place < bytes.length; place++) bytes[place] = characters.charCodeAt(place);
  return bytes;
}

function runTitle(run) {
  const group = page.data.groups[run.group];
  return group.seeds.length > 1 ? `${group.title}, seed ${run.seed}` : group.title;
}

// The choices of a list, changed only when they are others: the reader may be at it.
function syncOptions(select, options, chosen) {
  const wanted = JSON.stringify(options);
  if (select.dataset.options !== wanted) {
    select.replaceChildren(...options.map(([value, label]) => make("option", { value }, label)));
    select.dataset.options = wanted;
  }
  if (chosen !== null) select.value = chosen;
}

function missing(what, paths) {
  return make("p", { class: "missing" }, `${what} To make it: `,
    make("code", {}, `fedproto analyse ${paths[0]}`),
    paths.length > 1 ? " (and likewise for the others)." : ".");
}

function widthOf(host) {
  return page.printing ? PRINT_WIDTH : Math.max(200, host.clientWidth);
}
