// Charts by uPlot: hover, zoom by dragging (double click: all), one cursor for all; as a table for screen readers.
import { el, table } from "./dom.js";

const colours = ["#2f81f7", "#db6d28", "#3fb950", "#a371f7", "#e5534b", "#9e6a03", "#1f9ea8"];
const shared = { key: "steps" };

export function chart(title, columns, names) {
  const there = names.filter((name) => columns[name]?.some((value) => value !== null));
  if (!there.length) return null;
  const data = [columns.step, ...there.map((name) => columns[name])];
  const box = el("div", { "aria-hidden": "true" });
  const figure = el("section", { class: "chart", "aria-label": title }, el("h2", {}, title), box);
  const rows = data[0].map((step, at) => [step, ...there.map((name) => columns[name][at])]).slice(-200);
  const details = el("details", {}, el("summary", {}, "as a table"));
  details.addEventListener("toggle", () => details.open && details.childElementCount === 1 &&
    details.append(table(["step", ...there], rows, `${title}, the last ${rows.length} steps`)));
  figure.append(details);
  requestAnimationFrame(() => draw(box, title, data, there));
  return figure;
}

function draw(box, title, data, names) {
  const style = getComputedStyle(document.documentElement);
  const [text, line] = [style.getPropertyValue("--soft"), style.getPropertyValue("--line")];
  const axis = { stroke: text, grid: { stroke: line, width: 0.5 }, ticks: { stroke: line } };
  const width = Math.max(220, box.clientWidth);
  const plot = new uPlot({
    width, height: 180, cursor: { sync: { key: shared.key } }, scales: { x: { time: false } }, axes: [axis, { ...axis, size: 55 }],
    series: [{ label: "step" }, ...names.map((name, at) => ({ label: name, stroke: colours[at % colours.length], width: 1.5,
      spanGaps: true, points: { show: data[0].length < 30 } }))],
  }, data, box);
  new ResizeObserver(() => box.clientWidth > 0 && plot.setSize({ width: Math.max(220, box.clientWidth), height: 180 })).observe(box);
}
