// requires: openai
import OpenAI from "openai";
import { CITY, KEY, MODEL, QUESTION, URL, check, report } from "./feature.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY, maxRetries: 0 });
const messages = [{ role: "user", content: QUESTION }];
const tool = { type: "function", function: { name: "weather", parameters: CITY } };

await report({
  async chat() {
    const answer = await client.chat.completions.create({ model: MODEL, messages, max_tokens: 20 });
    check(answer.choices[0].message.content);
  },
  async stream() {
    let parts = 0;
    for await (const part of await client.chat.completions.create({ model: MODEL, messages, max_tokens: 20, stream: true }))
      parts += part.choices.length;
    check(parts > 3);
  },
  async tools() {
    const asked = { model: MODEL, messages, max_tokens: 80, tools: [tool], tool_choice: "required" };
    const answer = await client.chat.completions.create(asked);
    check(answer.choices[0].message.tool_calls[0].function.name === "weather");
  },
  async structured() {
    const format = { type: "json_schema", json_schema: { name: "city", schema: CITY } };
    const answer = await client.chat.completions.create({ model: MODEL, messages, response_format: format });
    check(JSON.parse(answer.choices[0].message.content).city);
  },
  async completions() {
    const answer = await client.completions.create({ model: MODEL, prompt: "One, two,", max_tokens: 9 });
    check(answer.choices[0].text);
  },
  async responses() {
    const first = await client.responses.create({ model: MODEL, input: QUESTION, max_output_tokens: 20 });
    check(first.output_text);
    let last;
    const asked = { model: MODEL, input: "And Rome?", previous_response_id: first.id, stream: true, max_output_tokens: 20 };
    for await (const event of await client.responses.create(asked)) last = event.type;
    check(last === "response.completed" || last === "response.incomplete");
  },
  async errors() {
    const refused = await client.chat.completions.create({ model: "x", messages }).catch((error) => error);
    check(refused instanceof OpenAI.NotFoundError);
  },
});
