// Vercel's SDK: streamText with tools, by /v1/responses, its default, and by chats.
//   npm install ai @ai-sdk/openai @ai-sdk/openai-compatible zod && node vercel.mjs http://127.0.0.1:8080/v1
import { streamText, stepCountIs, tool } from "ai";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { z } from "zod";

const options = { baseURL: process.argv[2], apiKey: "any" };
const openai = createOpenAI(options);
const compatible = createOpenAICompatible({ ...options, name: "local" });
let called;
const tools = {
  get_temperature: tool({
    description: "The temperature in a city, in degrees Celsius.",
    inputSchema: z.object({ city: z.string() }),
    execute: ({ city }) => (called.push(city), 20),
  }),
  to_fahrenheit: tool({
    description: "Convert degrees Celsius to Fahrenheit.",
    inputSchema: z.object({ celsius: z.number() }),
    execute: ({ celsius }) => (called.push(celsius), celsius * 1.8 + 32),
  }),
};
for (const [name, model] of Object.entries({ responses: openai("any"), chat: openai.chat("any"), compatible: compatible("any") })) {
  called = [];
  const prompt = "What is the temperature in Rome in Fahrenheit?";
  const result = streamText({ model, tools, prompt, temperature: 0, stopWhen: stepCountIs(4) });
  let text = "";
  for await (const part of result.textStream) text += part;
  console.log(`vercel, ${name}: ${called}: ${text}`);
  if (String(called) !== "Rome,20" || !text.includes("68")) process.exit(1);
}
