// @grpc/grpc-js against a running router: node client.js HOST:PORT PROTO_FOLDER. Prints "ok" when every check held.
'use strict';
const assert = require('node:assert');
const path = require('node:path');
const modules = process.env.BATON_NODE_MODULES;
const grpc = require(path.join(modules, '@grpc/grpc-js'));
const loader = require(path.join(modules, '@grpc/proto-loader'));

const [address, protos] = process.argv.slice(2);
const definition = loader.loadSync(path.join(protos, 'baton/v1/inference.proto'), {
  includeDirs: [protos], keepCase: true, longs: Number, defaults: true, oneofs: true,
});
const { Inference } = grpc.loadPackageDefinition(definition).baton.v1;
const client = new Inference(address, grpc.credentials.createInsecure());
const deadline = () => Date.now() + 60000;

function unary(method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, { deadline: deadline() }, (err, reply) => (err ? reject(err) : resolve(reply)));
  });
}

function generate(request, onMessage) {
  return new Promise((resolve, reject) => {
    const messages = [];
    const call = client.Generate(request, { deadline: deadline() });
    call.on('data', (m) => {
      messages.push(m);
      if (onMessage) onMessage(m, call);
    });
    call.on('error', reject);
    call.on('end', () => resolve(messages));
  });
}

async function main() {
  const { ids } = await unary('Tokenize', { text: 'The relay begins', add_special_tokens: true });
  assert.ok(ids.length > 1);
  const { text } = await unary('Detokenize', { ids, skip_special_tokens: true });
  assert.strictEqual(text, 'The relay begins');

  const sampling = { max_tokens: 12, temperature: 0, ignore_eos: true };
  const messages = await generate({ token_ids: { ids }, sampling, logprobs: 1 });
  const tokens = messages.flatMap((m) => m.token_ids);
  const last = messages[messages.length - 1];
  assert.strictEqual(tokens.length, 12);
  assert.strictEqual(last.finish_reason, 'length');
  assert.deepStrictEqual([last.usage.prompt_tokens, last.usage.completion_tokens], [ids.length, 12]);
  assert.strictEqual(last.usage.transferred_tokens, ids.length);

  const again = await Promise.all(Array.from({ length: 16 }, () => generate({ text: 'The relay begins', sampling })));
  for (const a of again) {
    assert.deepStrictEqual(a.flatMap((m) => m.token_ids), tokens);
  }

  const cancelled = await generate({ token_ids: { ids }, sampling: { max_tokens: 400, ignore_eos: true } },
    (m, call) => call.cancel()).catch((e) => e);
  assert.strictEqual(cancelled.code, grpc.status.CANCELLED);

  const bad = await generate({ token_ids: { ids }, sampling: { temperature: -1 } }).catch((e) => e);
  assert.strictEqual(bad.code, grpc.status.INVALID_ARGUMENT);
  assert.match(bad.details, /temperature/);

  const { models } = await unary('ListModels', {});
  assert.strictEqual(models.length, 1);
  const { nodes } = await unary('GetCluster', {});
  assert.deepStrictEqual(nodes.map((n) => n.role).sort(), ['decode', 'prefill']);
  client.close();
  console.log('ok');
}

main().catch((e) => {
  console.error(e);
  process.exit(1);
});
