# Sourced by apps/quickstart.sh and the scripts under tests/: finds or installs what a build needs on
# Debian and Ubuntu, and says what it installs.
#
#   gdnflow_setup_packages [PACKAGE...]   compiler, CMake and libraries, and the packages named
#   gdnflow_setup_cuda auto|always        sets GDNFLOW_CUDA (ON or OFF) and, for ON, exports CUDACXX

gdnflow_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# The wheels that hold NVIDIA's compiler: neither Debian nor Ubuntu packages nvcc 13.
gdnflow_cuda_wheels="nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85"

say() { printf '== %s\n' "$*"; }
die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 2
}

gdnflow_has_package() {
  [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# Installs those of the packages that are not there.
gdnflow_install() {
  local missing=() package sudo=()
  for package in "$@"; do
    gdnflow_has_package "$package" || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null ||
      die "expected root or sudo to install: ${missing[*]}; install these, then run this again"
    sudo=(sudo)
  fi
  say "installing with apt-get: ${missing[*]}"
  local log
  log=$(mktemp)
  # A list that is out of date names versions that are gone, so it is renewed first.
  if ! { "${sudo[@]}" apt-get update &&
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    die "apt-get could not install: ${missing[*]}"
  fi
  rm -f "$log"
}

gdnflow_setup_packages() {
  if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    say "not Debian or Ubuntu: using the compiler, CMake, Ninja, Boost.Program_options, Eigen, fmt," \
      "nlohmann-json, DLPack and doctest that are there"
    return 0
  fi
  gdnflow_install g++ cmake ninja-build ccache libboost-program-options-dev libeigen3-dev \
    libfmt-dev nlohmann-json3-dev libdlpack-dev gnuplot-nox "$@"
}

# Whether the machine has an NVIDIA GPU, with or without a working driver utility.
gdnflow_has_gpu() {
  nvidia-smi -L 2>/dev/null | grep -q GPU || compgen -G '/proc/driver/nvidia/gpus/*' >/dev/null ||
    compgen -G '/dev/nvidia[0-9]*' >/dev/null
}

# Prints the path of an nvcc of at least 13.0, if there is one.
gdnflow_find_nvcc() {
  local nvcc major
  for nvcc in ${CUDACXX:+"$CUDACXX"} nvcc /usr/local/cuda/bin/nvcc; do
    nvcc=$(command -v "$nvcc" 2>/dev/null) || continue
    major=$("$nvcc" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
    if [ "${major:-0}" -ge 13 ]; then
      printf '%s\n' "$nvcc"
      return 0
    fi
  done
  return 1
}

# Installs the wheels into build/cuda and prints the path of their nvcc.
gdnflow_install_wheels() {
  local venv=$gdnflow_root/build/cuda stamp home
  stamp=$venv/$(printf '%s' "$gdnflow_cuda_wheels" | cksum | cut -d ' ' -f 1).installed
  if [ ! -e "$stamp" ]; then
    rm -rf "$venv"
    mkdir -p "$gdnflow_root/build"
    python3 -m venv "$venv" >&2 && "$venv/bin/pip" install --quiet $gdnflow_cuda_wheels >&2 ||
      die "could not install NVIDIA's compiler from the package index: $gdnflow_cuda_wheels"
  fi
  home=$(echo "$venv"/lib/python3*/site-packages/nvidia/cu13)
  [ -x "$home/bin/nvcc" ] || die "expected nvcc at $home/bin/nvcc after installing the wheels"
  # nvcc looks for the runtime in lib64, the wheels put it into lib; CMake wants libcudart.so to take
  # the folder for a toolkit, though the static one is linked.
  [ -e "$home/lib64" ] || ln -s lib "$home/lib64"
  [ -e "$home/lib/libcudart.so" ] || ln -s libcudart.so.13 "$home/lib/libcudart.so"
  touch "$stamp"
  printf '%s\n' "$home/bin/nvcc"
}

gdnflow_setup_cuda() {
  local nvcc
  GDNFLOW_CUDA=OFF
  if nvcc=$(gdnflow_find_nvcc); then
    say "CUDA: $nvcc"
  elif [ "$1" = always ] || gdnflow_has_gpu; then
    command -v apt-get >/dev/null && gdnflow_install python3-venv
    say "CUDA: no nvcc of at least 13.0 here; NVIDIA's wheels for 13.0 go into build/cuda"
    nvcc=$(gdnflow_install_wheels) || exit
  else
    say "CUDA: no nvcc of at least 13.0 and no NVIDIA GPU, so host only (--cuda installs nvcc)"
    return 0
  fi
  GDNFLOW_CUDA=ON
  export CUDACXX=$nvcc
}

# Whether clang++ is here together with libFuzzer's runtime.
gdnflow_has_libfuzzer() {
  command -v clang++ >/dev/null &&
    [ -e "$(clang++ -print-runtime-dir 2>/dev/null)/libclang_rt.fuzzer-$(uname -m).a" ]
}
