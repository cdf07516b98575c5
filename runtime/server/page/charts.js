// Lines over the last minutes, as SVG; and the same figures in words.

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [300, 80];

/**
 * @typedef {object} Series
 * @property {string} name
 * @property {(number|null)[]} values Oldest first; null: there is none.
 */

export class Chart {
  /**
   * @param {string} title
   * @param {(value: number) => string} format
   * @param {string[]} names Of the series, at most two: the second one is dashed.
   */
  constructor(title, format, names) {
    this.title = title;
    this.format = format;
    this.svg = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.svg.setAttribute("aria-label", title);
    this.lines = names.map((_, place) => svg("path", { class: `line line-${place}` }));
    this.svg.append(svg("path", { class: "axis", d: `M0 ${HEIGHT - 0.5}H${WIDTH}` }), ...this.lines);
    this.top = document.createElement("span");
    this.now = names.map(() => document.createElement("b"));
    this.figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    const heading = document.createElement("h3");
    heading.textContent = title;
    const legend = document.createElement("p");
    names.forEach((name, place) => {
      const entry = document.createElement("span");
      entry.className = `legend line-${place}`;
      entry.append(name, " ", this.now[place]);
      legend.append(entry);
    });
    caption.append(heading, legend);
    this.top.className = "top";
    this.figure.append(caption, this.top, this.svg);
  }

  /**
   * @param {Series[]} series
   * @param {number} count Of values from the left edge to the right one.
   * @param {number} [most] At the upper edge; without it, the highest value is.
   */
  show(series, count, most) {
    const highest = most ?? Math.max(...series.flatMap(({ values }) => values.map((value) => value ?? 0)));
    this.top.textContent = highest > 0 ? this.format(highest) : "";
    series.forEach(({ values }, place) => {
      this.lines[place].setAttribute("d", path(values, count, highest || 1));
      this.now[place].textContent = this.#shown(values.at(-1));
    });
    const said = series.map(({ name, values }) => `${name} now ${this.#shown(values.at(-1))}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}: ${said}`);
  }

  #shown(value) {
    return value === null || value === undefined ? "–" : this.format(value);
  }
}

/** A line whose last value is at the right edge, with gaps where there is no value. */
function path(values, count, highest) {
  let isDrawing = false;
  return values
    .map((value, place) => {
      if (value === null) {
        isDrawing = false;
        return "";
      }
      const x = (WIDTH * (count - values.length + place)) / (count - 1);
      const y = HEIGHT - 2 - ((HEIGHT - 4) * value) / highest;
      const step = `${isDrawing ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      const isAlone = !isDrawing && (values[place + 1] ?? null) === null;
      isDrawing = true;
      return isAlone ? `${step}h0` : step; // a dot
    })
    .join("");
}

function svg(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
