// GET /metrics as numbers, and figures from two looks at it.

const PREFIX = "enginewright_";
const SAMPLE = /^([a-z0-9_]+)\{(.*)\} (\S+)$/i;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/**
 * One look at a model's metrics.
 *
 * @param {string} text As Prometheus reads it.
 * @param {string} model The label model_name.
 * @param {number} timeS When it was taken.
 * @returns {{timeS: number, values: Map<string, number>, buckets: Map<string, [number, number][]>}} `buckets`: upper
 *   bounds of a histogram, and the counts up to each.
 */
export function readMetrics(text, model, timeS) {
  const values = new Map();
  const buckets = new Map();
  for (const line of text.split("\n")) {
    const found = line.startsWith(PREFIX) && SAMPLE.exec(line);
    if (!found) continue;
    const name = found[1].slice(PREFIX.length);
    const labels = Object.fromEntries([...found[2].matchAll(LABEL)].map(([, key, value]) => [key, unescaped(value)]));
    if (labels.model_name !== model) continue;
    const value = Number(found[3]);
    if (labels.le === undefined) {
      values.set(name, value);
    } else {
      const histogram = name.replace(/_bucket$/, "");
      if (!buckets.has(histogram)) buckets.set(histogram, []);
      buckets.get(histogram).push([labels.le === "+Inf" ? Infinity : Number(labels.le), value]);
    }
  }
  return { timeS, values, buckets };
}

const unescaped = (text) => text.replace(/\\(.)/g, (_, char) => (char === "n" ? "\n" : char));

/** The value of a gauge; null: there is none. */
export const gauge = (look, name) => look.values.get(name) ?? null;

/** How much a counter grows in a second. */
export function rate(before, now, name) {
  const grown = growth(before, now, name);
  return grown === null ? null : grown / (now.timeS - before.timeS);
}

/** The mean of what a histogram has counted between two looks; null: nothing. */
export function mean(before, now, name) {
  const count = growth(before, now, `${name}_count`);
  return count ? growth(before, now, `${name}_sum`) / count : null;
}

/**
 * The value that a share of what a histogram has counted does not exceed, by interpolation within its bucket.
 *
 * @param {number} share From 0 to 1.
 */
export function quantile(before, now, name, share) {
  const [earlier, later] = [before.buckets.get(name), now.buckets.get(name)];
  if (!earlier || !later) return null;
  const counts = later.map(([bound, count], place) => [bound, count - earlier[place][1]]);
  const total = counts.at(-1)[1];
  if (total <= 0) return null;
  let [low, below] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= share * total) {
      if (bound === Infinity) return low;
      return low + ((bound - low) * (share * total - below)) / (count - below);
    }
    [low, below] = [bound, count];
  }
  return low;
}

/** Counters restart from zero when an engine is replaced or the server restarted; then there is no increase. */
function growth(before, now, name) {
  const [earlier, later] = [before.values.get(name), now.values.get(name)];
  return earlier === undefined || later === undefined || later < earlier ? null : later - earlier;
}
