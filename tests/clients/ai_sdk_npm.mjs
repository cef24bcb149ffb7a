// requires: ai @ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic zod
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";
import { KEY, MODEL, QUESTION, URL, check, report } from "./feature.mjs";

const compatible = createOpenAICompatible({
  name: "wager",
  baseURL: `${URL}/v1`,
  apiKey: KEY,
  supportsStructuredOutputs: true,
})(MODEL);
const prompt = QUESTION;
const maxOutputTokens = 60;
const maxRetries = 0;

await report({
  async chat() {
    check((await generateText({ model: compatible, prompt, maxOutputTokens, maxRetries })).text);
  },
  async stream() {
    let parts = 0;
    for await (const _ of streamText({ model: compatible, prompt, maxOutputTokens, maxRetries }).textStream) parts += 1;
    check(parts > 3);
  },
  async tools() {
    const weather = tool({ description: "Of a city", inputSchema: z.object({ city: z.enum(["Oslo", "Rome"]) }) });
    const asked = { model: compatible, prompt, maxOutputTokens, maxRetries, tools: { weather }, toolChoice: "required" };
    check((await generateText(asked)).toolCalls[0].toolName === "weather");
  },
  async structured() {
    const schema = z.object({ city: z.enum(["Oslo", "Rome"]) });
    check((await generateObject({ model: compatible, prompt, schema, maxRetries })).object.city);
  },
  async responses() {
    const model = createOpenAI({ baseURL: `${URL}/v1`, apiKey: KEY }).responses(MODEL);
    check((await generateText({ model, prompt, maxOutputTokens, maxRetries })).text);
  },
  async messages() {
    const model = createAnthropic({ baseURL: `${URL}/v1`, apiKey: KEY })(MODEL);
    check((await generateText({ model, prompt, maxOutputTokens, maxRetries })).text);
  },
});
