// Elements from data. No text is ever read as HTML.

/**
 * @param {string} tag
 * @param {object} properties Of the element; a name with a hyphen, `role` and `for` are attributes.
 * @param {...(Node|string)} children
 */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "for") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

/** A button that does not submit a form. */
export function button(label, onclick, properties = {}) {
  return element("button", { type: "button", onclick, ...properties }, label);
}

export const byId = (id) => document.getElementById(id);
