#!/usr/bin/env bash
# Every table and figure of the paper: one line per experiment, and one backbone for all rows that
# can share it.
#
#   bash run_all.sh                        everything at the paper's scale: train, then report
#   bash run_all.sh small table1 fig-kde   only what these two need, at scale small
#   bash run_all.sh smoke                  everything on generated images, minutes on two CPU cores
#   bash run_all.sh copied                 and the rows that the paper took from other papers
#   bash run_all.sh --list paper           print the commands, one a line, for xargs -P, GNU parallel
#                                          or a Slurm array
#
# Finished runs are skipped, interrupted ones continue, failed ones are named at the end and do not
# stop the others. Environment: SEEDS="0 1" instead of the paper's number of seeds; OUT and DATA, the
# folders of runs and data sets; WEIGHTS, a file for Table 2's ViT; LDC_FLAGS, flags for every run;
# PYTHON.
#
# Hours are of one GPU for one seed, estimated, not measured: epochs x images x views x FLOPs (three
# forward passes for a network that trains, one for a frozen one) at 30 TFLOP/s in bfloat16, 8 in
# float32 for the ViT. Images trained in a second are then 9,000 (ResNet-18, 32x32), 2,250 (64x64),
# 710 (224x224, the authors' stem), 2,750 (standard stem), 75 (ViT-B/16). One seed where the paper has
# no deviation. "leak": as the published code of CaSSLe and PFR has it; "wacv": POCON's newest
# command (README, Differences).
set -u
cd "$(dirname "$0")" || exit 2
experiments() { cat <<'END'
#fills                                               seeds data set     strategy and flags                            # the paper's A_last in %; hours
table1,table3,table5,fig-drift,fig-nme,fig-kde,fig-beyond 5 cifar100     lwf                                           # none 40.5, SDC 40.6, LDC 45.4; 0.2 h
table1,fig-nme                                            5 tinyimagenet lwf                                           # none 28.6, SDC 29.5, LDC 34.2; 1.8 h
table1,table4,fig-nme                                     5 imagenet100  lwf                                           # none 44.0, SDC 42.6, LDC 51.4; 7.4 h
table3,table5,table6,fig-drift                            3 cifar100     cassle                                        # 25 %: none 23.6, SDC 26.5, LDC 35.0; 2.6 h
table4                                                    3 imagenet100  cassle                                        # 25 %: none 27.36, SDC 26.6, LDC 35.8; 13.8 h
table1,table3                                             5 cifar100     pass                                          # 37.8; 0.8 h
table1,copied                                             5 cifar100     efc                                           # 43.6; 0.3 h
fig-drift                                                 5 cifar100     joint                                         # upper bound, no number; 0.9 h
table1                                                    5 tinyimagenet pass                                          # 31.2; 6.6 h
table1,copied                                             5 tinyimagenet efc                                           # 34.1; 2.4 h
table1,table4                                             5 imagenet100  pass                                          # 38.7; 26.9 h
table1,copied                                             5 imagenet100  efc                                           # 47.3; 2.9 h
table2                                                    3 cars         finetune --no-amp                             # none 53.4, SDC 53.3, LDC 62.9; 1.7 h
table3                                                    3 cifar100     pocon                                         # 25 %: 22.4, 26.7, 33.8; 4.6 h
table3                                                    1 cifar100     pass --label-fraction 0.008                   # 5.91; 0.1 h
table3                                                    1 cifar100     pass --label-fraction 0.05                    # 15.13; 0.1 h
table3                                                    1 cifar100     pass --label-fraction 0.25                    # 15.84; 0.2 h
table3,copied                                             3 cifar100     nncsl --label-fraction 0.008 --buffer-size 500 # 27.4; 2.5 h
table3,copied                                             3 cifar100     nncsl --label-fraction 0.05 --buffer-size 500 # 31.4; 2.5 h
table3,copied                                             3 cifar100     nncsl --label-fraction 0.25 --buffer-size 500 # 35.3; 2.5 h
table3                                                    3 cifar100     nncsl --label-fraction 0.008 --buffer-size 0  # 8.7; 1.8 h
table3                                                    3 cifar100     nncsl --label-fraction 0.05 --buffer-size 0   # 9.0; 1.8 h
table3                                                    3 cifar100     nncsl --label-fraction 0.25 --buffer-size 0   # 9.32; 1.8 h
table4                                                    3 imagenet100  pocon                                         # 25 %: 25.8, 25.7, 34.0; 24.6 h
table4                                                    1 imagenet100  pass --label-fraction 0.01                    # 1.76; 0.6 h
table4                                                    1 imagenet100  pass --label-fraction 0.05                    # 10.36; 1.7 h
table4                                                    1 imagenet100  pass --label-fraction 0.25                    # 23.9; 7.0 h
table4                                                    3 imagenet100  nncsl --label-fraction 0.01 --buffer-size 5120 # 35.4; 13.1 h
table4                                                    3 imagenet100  nncsl --label-fraction 0.05 --buffer-size 5120 # 41.6; 13.1 h
table4                                                    3 imagenet100  nncsl --label-fraction 0.25 --buffer-size 5120 # 47.1; 13.1 h
table4                                                    3 imagenet100  nncsl --label-fraction 0.01 --buffer-size 500 # 9.93; 13.1 h
table4                                                    3 imagenet100  nncsl --label-fraction 0.05 --buffer-size 500 # 15.1; 13.1 h
table4                                                    3 imagenet100  nncsl --label-fraction 0.25 --buffer-size 500 # 16.6; 13.1 h
table1                                                    5 cifar100     fetril                                        # 37.0; 0.1 h
table1                                                    5 cifar100     fecam                                         # 33.1; 0.1 h
table1                                                    5 tinyimagenet fetril                                        # 24.4; 0.4 h
table1                                                    5 tinyimagenet fecam                                         # 24.9; 0.4 h
table1                                                    5 imagenet100  fetril                                        # 40.7; 1.3 h
table1                                                    5 imagenet100  fecam                                         # 42.4; 1.3 h
fig-drift                                                 1 cifar100     joint-ssl                                     # upper bound, no number; 10.6 h
table3                                                    3 cifar100     pfr                                           # 25 %: 25.7, 24.8, 33.4; 2.6 h
table3                                                    3 cifar100     pfr --bn-leak --tag leak                      # 25 %: 25.7, 24.8, 33.4; 2.8 h
table3,table5,table6                                      3 cifar100     cassle --bn-leak --tag leak                   # 25 %: none 23.6, SDC 26.5, LDC 35.0; 3.0 h
table4                                                    3 imagenet100  pfr                                           # 25 %: 22.0, 19.8, 33.5; 13.9 h
table3                                                    3 cifar100     pocon --tag wacv --lambda-retrospection 25 --retrospection linear --batch-size 256 --expert-epochs 500 --first-epochs 500 --epochs 250 # 25 %: 22.4, 26.7, 33.8; 3.7 h
table4                                                    3 imagenet100  pocon --tag wacv --lambda-retrospection 25 --retrospection linear --expert-epochs 400 --first-epochs 400 --epochs 200 # 25 %: 25.8, 25.7, 34.0; 19.9 h
END
}
all="table1 table2 table3 table4 table5 table6 fig-drift fig-toy fig-nme fig-kde fig-curves fig-beyond"
list_only=no scale=paper copied=no what=''
for word in "$@"; do
  case $word in
    --list) list_only=yes;;
    paper | small | smoke) scale=$word;;
    copied) copied=yes;;
    all) what="$what $all";;
    table[1-6] | fig-drift | fig-toy | fig-nme | fig-kde | fig-curves | fig-beyond) what="$what $word";;
    *) echo "error: $word is unknown; expected --list, paper, small or smoke, copied, and any of $all, all." >&2
       exit 2;;
  esac
done
what=${what:-$all} OUT=${OUT:-runs} DATA=${DATA:-data} LDC_FLAGS=${LDC_FLAGS:-} WEIGHTS=${WEIGHTS:-}
[ -x .venv/bin/python ] && PYTHON=${PYTHON:-.venv/bin/python}
PYTHON=${PYTHON:-python} SEEDS=${SEEDS:-}
if [ $scale = smoke ]; then copied=yes SEEDS=${SEEDS:-0} WEIGHTS=${WEIGHTS:-none}; fi

commands() { # one a line, for what was asked for
  experiments | while read -r fills seeds dataset strategy flags; do
    start="$(printf %q "$PYTHON") ldc.py" wanted=no
    for one in $what; do case ",$fills," in *",$one,"*) wanted=yes;; esac; done
    case $fills in *,copied) [ $copied = yes ] || wanted=no;; esac
    [ $wanted = yes ] || continue
    flags=${flags%%#*}
    case $flags in --label-fraction*) # a folder of its own
      tag=${flags// /} tag=${tag#--}; flags="$flags --tag ${tag//--/-}";;
    esac
    [ -n "$WEIGHTS" ] && [ "$dataset" = cars ] && flags="$flags --weights $(printf %q "$WEIGHTS")"
    if [ $scale = smoke ]; then # one thread a run: the same numbers however many share the cores
      start="env OMP_NUM_THREADS=1 $start"
      flags="$(sed -E 's/--[a-z-]*(epochs|batch-size) [0-9]+//g' <<< "$flags") --generated --device cpu"
      case "$dataset $strategy" in # all rows twice are enough; the ViT is full-sized
        "cifar100 lwf" | "cifar100 cassle" | *" joint"*) ;;
        *net*" lwf") flags="$flags --compensators none sdc ldc nme-1 nme-5 nme-10 nme-20 nme-50 oracle";;
        "cars finetune") flags="$flags --limit 3 --compensators none sdc ldc oracle";;
        *) flags="$flags --compensators none sdc ldc oracle";;
      esac
    fi
    for seed in ${SEEDS:-$(seq 0 $((seeds - 1)))}; do
      echo $start --dataset "$dataset" --strategy "$strategy" $flags --scale $scale --seed "$seed" \
        --out-dir "$(printf %q "$OUT")" --data-dir "$(printf %q "$DATA")" $LDC_FLAGS
    done
  done
}
if [ $list_only = yes ]; then commands; exit; fi

failures=''
while read -r command <&3; do
  echo "$command" >&2
  bash -c "$command" > /dev/null; code=$?
  [ $code = 130 ] && exit 130 # Ctrl-C
  [ $code = 0 ] || failures="$failures
exit code $code: $command"
done 3< <(commands)

"$PYTHON" report.py "$OUT" --scale $scale --only $what; code=$?
if [ -n "$failures" ]; then
  echo "These runs failed; the same command tries them again:$failures" >&2; code=1
fi
exit $code
