#!/usr/bin/env bash
# From nothing to a trained model: installs into .venv, trains a small Llama on part of Python's own standard library (on all GPUs, or
# on two CPU processes), and shows what was written. launch/demo.sh [output folder] [more arguments of harness/run_clm.py]
set -uo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
install_all plots || exit
cd "$root" || exit

out=out/demo
if [ "$#" -gt 0 ] && [ "${1#-}" = "$1" ]; then
    out="$1"
    shift
fi
stdlib="$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
if compgen -G '/dev/nvidia[0-9]*' > /dev/null; then
    processes=()
else
    processes=(--num_processes 2)
fi

"$python" launch/run.py --engine auto "${processes[@]}" -- \
    --model_type llama \
    --config_overrides hidden_size=128,intermediate_size=384,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,tie_word_embeddings=true \
    --tokenizer_name bytes \
    --train_file "$stdlib/asyncio" "$stdlib/email" "$stdlib/json" \
    --block_size 128 --per_device_train_batch_size 8 --max_steps 300 \
    --learning_rate 5e-3 --lr_scheduler_type cosine --warmup_steps 20 --weight_decay 0.1 \
    --max_eval_samples 200 --eval_strategy steps --eval_steps 100 --logging_steps 10 --save_steps 150 --save_total_limit 1 \
    --output_dir "$out" --overwrite_output_dir "$@"
code=$?
if [ "$code" -ne 0 ]; then
    echo "the run ended with $code; see $out/train.log" >&2
    exit "$code"
fi

echo
echo "What is in $out:"
find "$out" -maxdepth 2 -type f -size +0 -not -path '*/checkpoint-*/*' | sort | sed 's/^/  /'
find "$out" -maxdepth 1 -type d -name 'checkpoint-*' | sort | sed 's/^/  /'
echo "Loss plot: $(find "$out/plots" -name '*.png' 2> /dev/null | sort | head -n 1)"
echo
echo "A sample from $out/final:"
"$python" launch/sample.py "$out/final" "async def "
