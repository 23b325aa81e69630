// Causal attention in float16 on the first GPU, and its last row of each head against the formula in double.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <vector>

#include "hopper_attention.hpp"

constexpr int SEQLEN = 1024, HEADS = 8, HEAD_DIM = 128, ELEMENTS = SEQLEN * HEADS * HEAD_DIM;

void check(cudaError_t code) {
  if (code != cudaSuccess) throw std::runtime_error(cudaGetErrorString(code));
}

std::vector<__half> draw(unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<__half> x(ELEMENTS);
  for (auto &element : x) element = __float2half(normal(generator));
  return x;
}

void *copy_to_gpu(const void *data, size_t bytes) {
  void *copy;
  check(cudaMalloc(&copy, bytes));
  if (data) check(cudaMemcpy(copy, data, bytes, cudaMemcpyHostToDevice));
  return copy;
}

// The largest difference of the last row of `out` from attention in double; that row sees all keys.
double error_of(const std::vector<__half> &q, const std::vector<__half> &k, const std::vector<__half> &v,
                const std::vector<__half> &out) {
  const auto at = [](const std::vector<__half> &x, int row, int head, int column) {
    return double(__half2float(x[(row * HEADS + head) * HEAD_DIM + column]));
  };
  double worst = 0;
  for (int head = 0; head < HEADS; head++) {
    std::vector<double> sum(HEAD_DIM);
    double weights = 0;
    for (int key = 0; key < SEQLEN; key++) {
      double score = 0;
      for (int c = 0; c < HEAD_DIM; c++) score += at(q, SEQLEN - 1, head, c) * at(k, key, head, c);
      const double weight = std::exp(score / std::sqrt(double(HEAD_DIM)));
      weights += weight;
      for (int c = 0; c < HEAD_DIM; c++) sum[c] += weight * at(v, key, head, c);
    }
    for (int c = 0; c < HEAD_DIM; c++)
      worst = std::fmax(worst, std::fabs(sum[c] / weights - at(out, SEQLEN - 1, head, c)));
  }
  return worst;
}

int main() try {
  check(cudaSetDevice(0));
  const auto q = draw(1), k = draw(2), v = draw(3);
  std::vector<__half> out(ELEMENTS);
  const size_t bytes = ELEMENTS * sizeof(__half);

  hopper_attention::forward_params p;
  p.dtype = HA_FLOAT16;
  p.batch = 1;
  p.seqlen_q = p.seqlen_k = SEQLEN;
  p.heads = p.kv_heads = HEADS;
  p.head_dim = p.head_dim_v = HEAD_DIM;
  p.q.data = copy_to_gpu(q.data(), bytes);
  p.k.data = copy_to_gpu(k.data(), bytes);
  p.v.data = copy_to_gpu(v.data(), bytes);
  p.out.data = copy_to_gpu(nullptr, bytes);
  p.causal = 1;
  p.workspace_size = hopper_attention::workspace_size(p);
  p.workspace = copy_to_gpu(nullptr, p.workspace_size);
  hopper_attention::init_workspace(p.workspace, p.workspace_size);
  hopper_attention::forward(p);

  check(cudaMemcpy(out.data(), p.out.data, bytes, cudaMemcpyDeviceToHost));
  const double error = error_of(q, k, v, out);
  std::printf("%s: largest error %.2e\n", hopper_attention::kernel_of(p).c_str(), error);
  return error < 1e-3 ? 0 : 1;
} catch (const std::exception &error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
