#include "shard/norm_words.h"

#include "shard/norm_words_cuda.h"

namespace tessera::shard {

using engine::Category;
using engine::DType;
using engine::Stream;
using engine::Tensor;

Tensor make_norm_words(const engine::Memory& memory) {
  return Tensor::empty(memory, {kNumNormWords}, DType::kI64, "norm", Category::kCommunication);
}

void add_squares(const Stream& stream, const Tensor& words, const Flat& flat, const Tensor& sum,
                 std::int64_t first_parameter) {
  if (flat.segments.empty()) return;
  stream.launch(
      {.name = "norm.add_squares",
       .flops = 2.0 * static_cast<double>(sum.numel()),
       .bytes_read = sum.nbytes()},
      [] {},
      [&](const auto& cuda_stream) {
        add_squares_cuda(cuda_stream, words, sum, flat.tiles, first_parameter);
      });
}

void finish_norm(const Stream& stream, const Tensor& norm, const Tensor& words, double mean_scale) {
  stream.launch(
      {.name = "norm.finish", .bytes_read = words.nbytes()}, [] {},
      [&](const auto& cuda_stream) {
        finish_norm_cuda(cuda_stream, norm, words, words.numel() / kNumNormWords, mean_scale);
      });
}

}  // namespace tessera::shard
