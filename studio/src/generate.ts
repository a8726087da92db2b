/** Streamed completions: token by token, with the scores that a field `midstream` asks for. */

import { stream, type Json } from "./api";

export interface Message {
  role: "system" | "user" | "assistant";
  content: string;
}

export interface Asked {
  model: string;
  format: "chat" | "text";
  messages: Message[];
  maxTokens: number;
  temperature: number;
  midstream?: Record<string, unknown> | undefined;
}

export interface Piece {
  text: string;
  logprob?: number;
}

export interface Update {
  pieces: Piece[];
  /** Position of the answer's first token, once it is known. */
  start: number | null;
  results: Json | null;
  finish: string | null;
}

export const pathOf = (asked: Asked) => (asked.format === "chat" ? "/v1/chat/completions" : "/v1/completions");

/** The body without what only this page needs. */
export function plainBody(asked: Asked): Record<string, unknown> {
  const { model, messages, maxTokens, temperature, midstream } = asked;
  return {
    model,
    ...(asked.format === "chat" ? { messages } : { prompt: promptOf(messages) }),
    max_tokens: maxTokens,
    temperature,
    ...(midstream ? { midstream } : {}),
  };
}

export function promptOf(messages: Message[]): string {
  return messages.map((one) => one.content).join("");
}

export async function* generate(asked: Asked, signal: AbortSignal): AsyncGenerator<Update> {
  const isChat = asked.format === "chat";
  const body = {
    ...plainBody(asked),
    stream: true,
    return_token_ids: true,
    ...(isChat ? { logprobs: true, top_logprobs: 0 } : { logprobs: 0 }),
  };
  const decoder = new TextDecoder();
  let start: number | null = null;
  for await (const value of stream(pathOf(asked), body, signal)) {
    const choice = value.choices?.[0];
    const prompt = value.prompt_token_ids ?? choice?.prompt_token_ids;
    if (Array.isArray(prompt)) start = prompt.length;
    const results = value.midstream ?? choice?.midstream ?? null;
    const finish = choice?.finish_reason ?? null;
    const text: string = (isChat ? choice?.delta?.content : choice?.text) ?? "";
    const pieces = piecesOf(choice?.logprobs, text, decoder, isChat);
    if (pieces.length || results || finish || start !== null) yield { pieces, start, results, finish };
  }
}

function piecesOf(logprobs: Json, text: string, decoder: TextDecoder, isChat: boolean): Piece[] {
  if (isChat && Array.isArray(logprobs?.content)) {
    const pieces = (logprobs.content as Json[]).map((one) => ({
      // A character may be spread over tokens: the last one of them shows it.
      text: Array.isArray(one.bytes) ? decoder.decode(Uint8Array.from(one.bytes), { stream: true }) : String(one.token),
      logprob: Number(one.logprob),
    }));
    // The token that ends an answer has no text in it.
    if (!text && pieces.length === 1) pieces[0]!.text = "";
    return pieces;
  }
  if (Array.isArray(logprobs?.tokens)) {
    const tokens = logprobs.tokens as string[];
    const values = logprobs.token_logprobs as (number | null)[];
    if (tokens.length === 1) return [{ text, logprob: values[0] ?? Number.NaN }];
    return tokens.map((one, nth) => ({ text: one, logprob: values[nth] ?? Number.NaN }));
  }
  return text ? [{ text }] : [];
}
