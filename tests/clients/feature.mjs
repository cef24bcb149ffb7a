// The same as feature.py, for clients in JavaScript: `node SCRIPT URL MODEL`.
export const [URL, MODEL] = process.argv.slice(2);
export const KEY = "no-key-is-needed";
export const QUESTION = "What is the weather in Oslo?";
export const CITY = {
  type: "object",
  properties: { city: { enum: ["Oslo", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};

export function check(condition) {
  if (!condition) throw new Error("the answer is another than expected");
}

export async function report(features) {
  const found = {};
  for (const [name, feature] of Object.entries(features)) {
    try {
      await feature();
      found[name] = "yes";
    } catch (error) {
      console.error(error);
      found[name] = `no: ${error.name}: ${String(error.message).slice(0, 200)}`;
    }
  }
  console.log(JSON.stringify(found));
}
