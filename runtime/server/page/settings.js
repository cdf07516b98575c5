// What a reader sets, as requests have it.

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];

/** A setting that cannot be used; `message` says why, and `field` is where it stands. */
export class SettingError extends Error {
  constructor(message, field) {
    super(message);
    this.field = field;
  }
}

/**
 * The settings in a form.
 *
 * @param {HTMLFormElement} form
 * @returns {{system: string, parameters: object}} `parameters` are keys of a request.
 * @throws {SettingError}
 */
export function readSettings(form) {
  const fields = form.elements;
  const parameters = {};
  for (const name of NUMBERS) {
    const field = fields[name];
    const label = field.labels[0].textContent;
    if (!field.validity.valid) throw new SettingError(`${label}: ${field.validationMessage}`, field);
    if (field.value !== "") parameters[name] = field.valueAsNumber;
  }
  if (fields.thinking.value) parameters.chat_template_kwargs = { enable_thinking: fields.thinking.value === "on" };
  if (fields.tools.value.trim()) {
    parameters.tools = readTools(fields.tools);
    if (fields.tool_choice.value) parameters.tool_choice = fields.tool_choice.value;
  }
  return { system: fields.system.value.trim(), parameters };
}

/** A list; what is wrong in it the server says. */
function readTools(field) {
  let tools;
  try {
    tools = JSON.parse(field.value);
  } catch (error) {
    throw new SettingError(`The tools are not JSON: ${error.message}`, field);
  }
  if (!Array.isArray(tools)) throw new SettingError("The tools must be a list: […]", field);
  return tools;
}
