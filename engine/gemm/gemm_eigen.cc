#include "engine/gemm/gemm_eigen.h"

#include <Eigen/Core>

namespace tessera::engine::TESSERA_LEVEL {
namespace {

class FixedBlocking : public Eigen::internal::level3_blocking<float, float> {
 public:
  explicit FixedBlocking(std::int64_t k) {
    // Panels of at most kMaxDepth, of equal size: 24 rows of one fit a 32 KiB first-level cache
    // beside 4 columns; a block of kRows of them fits a 512 KiB second-level cache.
    const std::int64_t panels = k <= kMaxDepth ? 1 : (k + kMaxDepth - 1) / kMaxDepth;
    m_kc = ((k + panels - 1) / panels + 7) / 8 * 8;
    m_mc = kRows;
    m_nc = kCols;
  }

 private:
  static constexpr std::int64_t kMaxDepth = 256, kRows = 192, kCols = 1024;
};

template <int kOrderA, int kOrderB>
void run(const EigenProduct& p) {
  FixedBlocking blocking(p.k);
  Eigen::internal::general_matrix_matrix_product<std::int64_t, float, kOrderA, false, float,
                                                 kOrderB, false, Eigen::ColMajor,
                                                 /*ResInnerStride=*/1>::run(p.m, p.n, p.k, p.a,
                                                                            p.lda, p.b, p.ldb, p.c,
                                                                            /*resIncr=*/1, p.ldc,
                                                                            1.0f, blocking);
}

}  // namespace

extern const int kEigenVersion[3] = {EIGEN_WORLD_VERSION, EIGEN_MAJOR_VERSION, EIGEN_MINOR_VERSION};

void add_product(const EigenProduct& p) {
  if (p.a_row_major) {
    p.b_row_major ? run<Eigen::RowMajor, Eigen::RowMajor>(p)
                  : run<Eigen::RowMajor, Eigen::ColMajor>(p);
  } else {
    p.b_row_major ? run<Eigen::ColMajor, Eigen::RowMajor>(p)
                  : run<Eigen::ColMajor, Eigen::ColMajor>(p);
  }
}

}  // namespace tessera::engine::TESSERA_LEVEL
