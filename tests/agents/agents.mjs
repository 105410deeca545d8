// OpenAI's Agents SDK: an agent with tools, by /v1/responses, its default, whole and streamed.
//   npm install @openai/agents zod && OPENAI_BASE_URL=http://127.0.0.1:8080/v1 node agents.mjs
import { Agent, run, setTracingDisabled, tool } from "@openai/agents";
import { z } from "zod";

setTracingDisabled(true);
let called;
const tools = [
  tool({
    name: "get_temperature",
    description: "The temperature in a city, in degrees Celsius.",
    parameters: z.object({ city: z.string() }),
    execute: ({ city }) => (called.push(city), 20),
  }),
  tool({
    name: "to_fahrenheit",
    description: "Convert degrees Celsius to Fahrenheit.",
    parameters: z.object({ celsius: z.number() }),
    execute: ({ celsius }) => (called.push(celsius), celsius * 1.8 + 32),
  }),
];
for (const stream of [false, true]) {
  called = [];
  const agent = new Agent({ name: "A", model: "any", tools });
  const result = await run(agent, "What is the temperature in Rome in Fahrenheit?", { stream });
  if (stream) for await (const _ of result);
  console.log(`agents, ${stream}: ${called}: ${result.finalOutput}`);
  if (String(called) !== "Rome,20" || !result.finalOutput.includes("68")) process.exit(1);
}
