#!/bin/sh
# lm-eval's local-completions (echo and logprobs), with a task of its own in JSON lines, against a running server:
#   agentinfer serve demo --max-queued 1000 &
#   sh examples/lm_eval_local.sh demo ~/.cache/agentinfer/SmolLM2-135M-Instruct-1
# The second argument is the folder of the model's tokenizer: lm-eval counts tokens itself. More are lm-eval's own, such
# as --output_path and --log_samples. BASE_URL in the environment is another server's.
set -eu
model=$1 tokenizer=$2
shift 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/task.jsonl" <<'DATA'
{"question": "The capital of France is", "choices": [" Paris", " Berlin", " Rome"], "answer": 0}
{"question": "Two plus two is", "choices": [" nine", " four", " one hundred"], "answer": 1}
{"question": "The opposite of hot is", "choices": [" tall", " green", " cold"], "answer": 2}
{"question": "Cats and dogs are", "choices": [" animals", " numbers", " cities"], "answer": 0}
DATA
cat > "$work/task.yaml" <<TASK
task: local_facts
dataset_path: json
dataset_kwargs: {data_files: {validation: $work/task.jsonl}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
TASK
export HF_HUB_OFFLINE=1
lm_eval --model local-completions --tasks local_facts --include_path "$work" --batch_size 4 \
  --model_args "model=$model,base_url=${BASE_URL:-http://127.0.0.1:8000}/v1/completions,tokenizer=$tokenizer,tokenizer_backend=huggingface,num_concurrent=2" "$@"
