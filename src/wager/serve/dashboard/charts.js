// Charts as SVG: curves over time, alone or stacked, and columns. Each says in words what it shows.

import { element, number, write } from "./page.js";
import { SPAN } from "./history.js";

const LEFT = 38,
  RIGHT = 6,
  TOP = 14,
  BOTTOM = 20;
const GAP = 5; // seconds without a reading after which a curve is interrupted

function shape(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

// The least of 1, 2, 2.5, 5, 10 ... that is not below a value.
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= value * 0.999);
}

// What all charts have: a heading, a legend, and a drawing as wide as its place.
class Chart {
  constructor(figure, { title, unit = "", digits = 0, most = null, least = 1 }) {
    Object.assign(this, { title, unit, digits, most, least, top: least, width: 0, height: 0 });
    this.legend = element("p", { className: "legend" });
    this.svg = shape("svg", { role: "img" });
    figure.append(element("figcaption", {}, element("h3", {}, title), this.legend), this.svg);
    new ResizeObserver(() => requestAnimationFrame(() => this.draw())).observe(figure);
  }

  // What is above the scale is drawn at its upper end.
  y(value) {
    return this.bottom - Math.min(1, value / this.top) * (this.bottom - TOP);
  }

  text(value) {
    return `${number(value, this.digits)}${Number.isFinite(value) && this.unit ? ` ${this.unit}` : ""}`;
  }

  // The scale: from 0 to what is not below `greatest`.
  frame(greatest) {
    this.width = Math.max(160, this.svg.clientWidth);
    this.height = Math.max(100, this.svg.clientHeight);
    this.bottom = this.height - BOTTOM;
    this.top = this.most ?? ceiling(Math.max(this.least, greatest));
    return [0, 0.5, 1].flatMap((share) => {
      const value = Number((share * this.top).toPrecision(3)),
        y = this.y(value);
      return [
        shape("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }),
        shape("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, value.toLocaleString("en")),
      ];
    });
  }

  show(shapes, words) {
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.setAttribute("aria-label", `${this.title}: ${words}`);
    this.svg.replaceChildren(...shapes);
  }
}

// Curves of `series` ({name, of: sample -> number or null}); with `stacked` each lies on those before it. The scale
// holds the share `shown` of the samples: a few that are far above the others would make those flat.
export class TimeChart extends Chart {
  constructor(figure, { series, stacked = false, shown = 1, reference = null, ...options }) {
    super(figure, options);
    Object.assign(this, { stacked, share: shown, reference, samples: [], pointer: null });
    this.setSeries(series);
    this.svg.classList.toggle("soft", !stacked && series.length === 1);
    this.legend.classList.toggle("lines", !stacked);
    this.svg.addEventListener("pointermove", (event) =>
      this.point(event.clientX - this.svg.getBoundingClientRect().left),
    );
    this.svg.addEventListener("pointerleave", () => this.point(null));
  }

  setSeries(series) {
    this.series = series;
    this.values = series.map(() => element("b"));
    this.legend.replaceChildren(
      ...series.map(({ name }, at) =>
        element("span", { className: `key k${at + 1}` }, ...(name ? [element("i"), `${name} `] : []), this.values[at]),
      ),
    );
  }

  point(x) {
    this.pointer = x;
    this.draw();
  }

  draw(samples = this.samples) {
    this.samples = samples;
    const heights = samples.map((each) => {
      let below = 0;
      return this.series.map(({ of }) => {
        const value = of(each);
        return value === null || !this.stacked ? value : (below += value);
      });
    });
    const greatest = heights.map((each) => Math.max(0, ...each)).sort((one, other) => one - other);
    const shapes = this.frame(greatest[Math.floor(this.share * (greatest.length - 1))] ?? 0);
    this.end = samples.at(-1)?.at ?? 0;
    shapes.push(
      ...[180, 120, 60, 0].map((ago) =>
        shape(
          "text",
          {
            x: this.x(this.end - ago),
            y: this.height - 4,
            "text-anchor": ago === 180 ? "start" : ago ? "middle" : "end",
          },
          ago ? `−${ago / 60} min` : "now",
        ),
      ),
    );
    if (this.reference !== null) {
      const y = this.y(this.reference);
      shapes.push(shape("line", { class: "reference", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }));
    }
    for (let at = this.series.length - 1; at >= 0; at--) shapes.push(...this.curve(heights, at));
    const shown = this.shown();
    if (this.pointer !== null && shown) {
      shapes.push(
        shape("line", { class: "pointer", x1: this.x(shown.at), x2: this.x(shown.at), y1: TOP, y2: this.bottom }),
      );
    }
    this.series.forEach(({ of }, at) => write(this.values[at], shown ? this.text(of(shown)) : "–"));
    this.show(shapes, this.words());
  }

  x(at) {
    return LEFT + (1 - (this.end - at) / SPAN) * (this.width - LEFT - RIGHT);
  }

  // The sample that the legend shows: the last one, or that below the pointer.
  shown() {
    if (this.pointer === null) return this.samples.at(-1);
    return this.samples.reduce(
      (best, each) =>
        !best || Math.abs(this.x(each.at) - this.pointer) < Math.abs(this.x(best.at) - this.pointer) ? each : best,
      null,
    );
  }

  curve(heights, at) {
    const shapes = [],
      area = this.stacked || this.series.length === 1;
    const place = (when, value) => `${Math.max(LEFT, this.x(when)).toFixed(1)},${this.y(value).toFixed(1)}`;
    for (const part of this.parts(heights, at)) {
      // a sample is of the second before it: one alone is seen, too
      const points = [part[0], ...part].map((index, nth) => [this.samples[index].at - (nth ? 0 : 1), heights[index]]);
      const over = points.map(([when, height]) => place(when, height[at]));
      if (area) {
        const under = points.map(([when, height]) => place(when, this.stacked && at ? height[at - 1] : 0)).reverse();
        shapes.push(shape("polygon", { class: `area a${at + 1}`, points: [...over, ...under].join(" ") }));
      }
      if (!this.stacked) shapes.push(shape("polyline", { class: `line l${at + 1}`, points: over.join(" ") }));
    }
    return shapes;
  }

  // Runs of samples without a gap.
  parts(heights, at) {
    const parts = [];
    let open = null;
    this.samples.forEach((each, index) => {
      if (heights[index][at] === null) open = null;
      else if (open && each.at - this.samples[index - 1].at < GAP) open.push(index);
      else parts.push((open = [index]));
    });
    return parts;
  }

  words() {
    return this.series
      .map(({ name, of }) => {
        const { now, least, most } = extent(this.samples, of);
        const range = [least, most].map((value) => number(value, this.digits)).join(" and ");
        return [name, most < least ? "nothing yet" : `${this.text(now)} now, between ${range}`]
          .filter(Boolean)
          .join(" ");
      })
      .join("; ");
  }
}

// The last value of a series, its mean, and its extremes.
export function extent(samples, of) {
  const values = samples.map(of).filter((value) => value !== null);
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  return {
    now: samples.length ? of(samples.at(-1)) : null,
    mean,
    least: Math.min(...values),
    most: Math.max(...values),
  };
}

// Columns at whole numbers from `first` on, side by side for each of `series` ({name, kind, values}).
export class ColumnChart extends Chart {
  constructor(figure, { first, axis, ...options }) {
    super(figure, options);
    Object.assign(this, { first, axis, series: [], note: "" });
  }

  draw(series = this.series, note = this.note) {
    Object.assign(this, { series, note });
    const shapes = this.frame(Math.max(0, ...series.flatMap(({ values }) => values)));
    const places = Math.max(1, ...series.map(({ values }) => values.length));
    const step = (this.width - LEFT - RIGHT) / Math.max(places, 4);
    const wide = Math.max(3, Math.min(44, step * 0.72) / Math.max(1, series.length));
    for (let place = 0; place < places; place++) {
      const middle = LEFT + (place + 0.5) * step;
      if (place % Math.ceil(20 / step) === 0) {
        shapes.push(
          shape("text", { x: middle, y: this.height - 4, "text-anchor": "middle" }, String(place + this.first)),
        );
      }
      series.forEach(({ kind, values }, at) => {
        const value = values[place] ?? null;
        if (value === null) return;
        const x = middle + (at - series.length / 2) * wide,
          y = Math.min(this.y(value), this.bottom - 1);
        shapes.push(shape("rect", { class: `bar a${kind}`, x: x + 1, y, width: wide - 2, height: this.bottom - y }));
        if (wide > 24 && value > 0)
          shapes.push(
            shape("text", { class: "value", x: x + wide / 2, y: y - 3, "text-anchor": "middle" }, number(value)),
          );
      });
    }
    this.legend.replaceChildren(
      ...series
        .filter(({ name }) => name)
        .map(({ name, kind }) => element("span", { className: `key k${kind}` }, element("i"), name)),
      element("span", {}, note),
    );
    this.show(shapes, this.words());
  }

  words() {
    return (
      this.series
        .map(({ name, values }) =>
          [name, ...values.map((value, place) => `${this.axis} ${place + this.first}: ${this.text(value)}`)]
            .filter(Boolean)
            .join(", "),
        )
        .join("; ") || "nothing yet"
    );
  }
}
